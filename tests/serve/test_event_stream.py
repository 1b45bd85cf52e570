"""Streams of an engine that takes its time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from live_server import MODEL, LiveServer, live_server

from qwen4exp_trt.errors import DroppedError, RequestError
from qwen4exp_trt.runtime.metrics import RequestMetrics
from qwen4exp_trt.runtime.outputs import StreamChunk
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.serve import live_response

PAUSE_S = 0.3


class SlowLLM:
    """Answers with the items of `script`, which it raises if they are errors, each after a pause if `pauses`."""

    def __init__(self) -> None:
        self.script: list[str | Exception] = []
        self.pauses = True
        self.default_sampling_params = SamplingParams()
        self.manifest = SimpleNamespace(limits=SimpleNamespace(max_seq_len=64))

    async def generate(self, *_: Any, **__: Any) -> AsyncIterator[StreamChunk]:
        for item in self.script:
            await asyncio.sleep(PAUSE_S if self.pauses else 0)
            if isinstance(item, Exception):
                raise item
            is_last = item is self.script[-1]
            yield StreamChunk(item, [1], "stop" if is_last else None, metrics=RequestMetrics(0.0) if is_last else None)

    def metrics(self) -> list[Any]:
        return []

    async def close(self, timeout: float = 0.0) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[LiveServer]:
    monkeypatch.setattr(live_response, "KEEP_ALIVE_S", PAUSE_S / 3)
    with live_server(SlowLLM()) as server:
        yield server


def lines(server: LiveServer) -> tuple[int, list[str]]:
    body = {"prompt": "x", "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=10) as response:
        return response.status_code, [line for line in response.iter_lines() if line]


def test_comments_keep_a_silent_stream_alive(server: LiveServer) -> None:
    llm: Any = server.llm
    llm.script = ["a", "b"]
    status, found = lines(server)
    kinds = "".join("." if line == ": keep-alive" else "d" for line in found)
    assert status == 200 and found[-1] == "data: [DONE]"
    first, second, end = kinds.split("d", 2)
    assert len(first) >= 1 and len(second) >= 1 and end == "d"
    llm.pauses = False
    assert ": keep-alive" not in lines(server)[1]


def test_the_openai_client_does_not_see_the_comments(server: LiveServer) -> None:
    llm: Any = server.llm
    llm.script = ["a", "b"]
    stream = server.openai().completions.create(model=MODEL, prompt="x", stream=True)
    assert [chunk.choices[0].text for chunk in stream] == ["a", "b"]


@pytest.mark.parametrize(("error", "status"), [(RequestError("no such thing"), 400), (DroppedError("lost"), 500)])
def test_an_early_error_has_its_status_and_a_late_one_its_event(
    server: LiveServer, error: Exception, status: int
) -> None:
    llm: Any = server.llm
    llm.script, llm.pauses = [error], False
    found_status, _ = lines(server)
    assert found_status == status
    for script, pauses in (([error], True), (["a", error], False)):
        llm.script, llm.pauses = script, pauses
        found_status, found = lines(server)
        assert found_status == 200
        assert found[-1].startswith('data: {"error":{"message":"') and str(error) in found[-1]
        with pytest.raises(openai.APIError, match=str(error)):
            list(server.openai().completions.create(model=MODEL, prompt="x", stream=True))
