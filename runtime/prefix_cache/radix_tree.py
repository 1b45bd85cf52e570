"""A radix tree over blocks of token ids: a path from the root is a prefix, an edge one block."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Literal

import numpy as np

from qwen4exp_trt.runtime.prefix_cache.packed_rows import PackedRow

KEY_BYTES = 16

Kind = Literal["page", "slot"]
"""What is kept of a node."""


class Node:
    """A prefix of ``depth`` blocks, and what memory has of it: the page of its last block, and the slot behind it.

    ``tokens``: the ids of its last block as little-endian int32. What is on disk is known by ``key``, which follows
    from the whole prefix and from the root's key.
    """

    def __init__(self, parent: Node | None, tokens: bytes) -> None:
        self.parent, self.tokens = parent, tokens
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.children: dict[bytes, Node] = {}
        self.page: int | None = None
        """The number of a page of the pool; the tree has a reference to it."""
        self.slot: PackedRow | None = None
        """On the device."""
        self.host: dict[Kind, PackedRow] = {}
        """Those of its page and slot that are on the host."""

    @cached_property
    def key(self) -> bytes:
        assert self.parent is not None, "a root is given its key"
        return child_key(self.parent.key, self.tokens)

    @property
    def is_bare(self) -> bool:
        """True if memory has nothing of it."""
        return self.page is None and self.slot is None and not self.host

    def path(self) -> list[Node]:
        """The nodes from the first block to this one."""
        nodes: list[Node] = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def below(self) -> Iterator[Node]:
        """This node and all that begin with its prefix."""
        pending: list[Node] = [self]
        while pending:
            node = pending.pop()
            yield node
            pending.extend(node.children.values())


class RadixTree:
    """All prefixes that something is known of. ``root_key`` tells models apart on disk."""

    def __init__(self, block_size: int, root_key: bytes) -> None:
        self.block_size = block_size
        self.root = Node(None, b"")
        self.root.key = root_key

    def add(self, parent: Node, tokens: bytes) -> Node:
        """The child of ``parent`` that continues it by a block."""
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = Node(parent, tokens)
        return node

    def attach(self, path: Sequence[Node]) -> None:
        """Put the nodes of a path back, where they were pruned while they were in use."""
        for node in path:
            assert node.parent is not None
            assert node.parent.children.get(node.tokens, node) is node
            node.parent.children[node.tokens] = node

    def prune(self, node: Node) -> None:
        """Take ``node`` out if nothing is known of it and of what begins with it, and then its parents likewise."""
        while node.parent is not None and node.is_bare and not node.children:
            parent = node.parent
            if parent.children.get(node.tokens) is node:
                del parent.children[node.tokens]
            node = parent


class BlockedTokens:
    """The token ids of a growing sequence, cut into blocks."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._blocks: list[bytes] = []

    def blocks(self, token_ids: Sequence[int], count: int) -> list[bytes]:
        """The first ``count`` blocks; ``token_ids`` have at least as many and are those of earlier calls, continued."""
        have, size = len(self._blocks), self._block_size
        if have < count:
            new = np.array(token_ids[have * size : count * size], dtype="<i4").tobytes()
            step = size * 4
            self._blocks += [new[start : start + step] for start in range(0, len(new), step)]
        return self._blocks[:count]


def child_key(parent_key: bytes, tokens: bytes) -> bytes:
    """The key of the prefix that continues another one by the block ``tokens``."""
    return hashlib.blake2b(parent_key + tokens, digest_size=KEY_BYTES).digest()
