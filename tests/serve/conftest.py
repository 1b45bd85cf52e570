from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import bundles
import openai
import pytest
from live_server import LiveServer, live_server

from qwen4exp_trt.runtime import LLM, AsyncLLM


@pytest.fixture(scope="session")
def served_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo without an engine: what is served is the same, and it takes a third of the time to build."""
    output = tmp_path_factory.getbasetemp() / "served"
    return bundles.build(bundles.DEMO_CHECKPOINT, output, max_seq_len=768, block_size=16, prefill_chunk=128)


@pytest.fixture(scope="module")
def llm(served_bundle: Path) -> LLM:
    return LLM(served_bundle)


@pytest.fixture(scope="module")
def server(served_bundle: Path) -> Iterator[LiveServer]:
    with live_server(AsyncLLM(served_bundle, max_waiting=3)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: LiveServer) -> openai.OpenAI:
    return server.openai()
