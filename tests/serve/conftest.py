from __future__ import annotations

from pathlib import Path

import bundles
import pytest


@pytest.fixture(scope="session")
def served_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo without an engine: what is served is the same, and it takes a third of the time to build."""
    output = tmp_path_factory.getbasetemp() / "served"
    return bundles.build(bundles.DEMO_CHECKPOINT, output, max_seq_len=768, block_size=16, prefill_chunk=128)
