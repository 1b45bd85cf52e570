"""The blobs of a node: how they are called, and what their headers say."""

from __future__ import annotations

from typing import Any

import numpy as np

from qwen4exp_trt.runtime.prefix_cache.blob import header_bytes
from qwen4exp_trt.runtime.prefix_cache.radix_tree import Kind, Node, RadixTree

SUFFIX = ".blob"


def blob_name(node: Node, kind: Kind) -> str:
    """The name of a file."""
    return f"{node.key.hex()}.{kind}{SUFFIX}"


def blob_header(node: Node, kind: Kind, tree: RadixTree, rows: list[list[Any]]) -> bytes:
    """All that a blob belongs to; ``rows`` describe its payload."""
    assert node.parent is not None
    return header_bytes(
        model=tree.root.key.hex(),
        kind=kind,
        key=node.key.hex(),
        parent=node.parent.key.hex(),
        num_tokens=node.depth * tree.block_size,
        token_ids=np.frombuffer(node.tokens, dtype="<i4").tolist(),
        rows=rows,
    )
