"""What the engine's thread does when something goes wrong, over a backend without a model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from counting_backend import NAN_TOKEN, VOCAB_SIZE, CountingBackend

from qwen4exp_trt.errors import EngineError, RequestError
from qwen4exp_trt.runtime import SamplingParams, engine_core
from qwen4exp_trt.runtime.engine_core import EngineCore
from qwen4exp_trt.runtime.engine_thread import EngineThread, OpenRequest
from qwen4exp_trt.runtime.limits import EngineLimits

LIMITS = EngineLimits(max_batch_size=3, max_seq_len=32, prefill_chunk=8, block_size=4)
GREEDY = SamplingParams(temperature=0, max_tokens=4)

Main = Callable[[EngineThread, EngineCore, "SlowBackend"], Coroutine[Any, Any, None]]


class SlowBackend(CountingBackend):
    """Waits for `may_step` before each step."""

    def __init__(self) -> None:
        super().__init__()
        self.may_step = threading.Event()
        self.may_step.set()
        self.is_stepping = threading.Event()

    def run(self, inputs: Any) -> Any:
        self.is_stepping.set()
        assert self.may_step.wait(30)
        return super().run(inputs)


@pytest.fixture
def run() -> Callable[..., None]:
    """Runs a test with an engine, which is idle at the end unless it has died."""

    def run(main: Main, dies: bool = False) -> None:
        backend = SlowBackend()
        core = EngineCore(backend, LIMITS, 24, VOCAB_SIZE, (), None)
        engine = EngineThread(core)
        try:
            asyncio.run(main(engine, core, backend))
        finally:
            backend.may_step.set()
            engine.close()
        if dies:
            return
        assert core.scheduler.num_unfinished == 0
        assert (core.scheduler.num_free_slots, core.scheduler.num_free_blocks) == (3, 24)

    return run


def submit(engine: EngineThread, core: EngineCore, token: int, name: str | None = None) -> OpenRequest:
    return engine.submit(core.make_sequence(None, [token], GREEDY, request_id=name))


async def output(request: OpenRequest) -> list[int]:
    tokens = []
    while True:
        chunk = await request.next_chunk()
        tokens += chunk.token_ids
        if chunk.finish_reason is not None:
            return tokens


def test_a_step_that_fails_fails_its_requests_and_no_others(run: Callable[..., None]) -> None:
    async def main(engine: EngineThread, core: EngineCore, backend: SlowBackend) -> None:
        backend.may_step.clear()
        first = submit(engine, core, 1)
        backend.is_stepping.wait()
        backend.error = RuntimeError("a kernel was not found\nmany more lines")
        second = submit(engine, core, 5)
        backend.may_step.set()
        with pytest.raises(RequestError, match=r"was dropped: a step failed .*: RuntimeError: a kernel was not found$"):
            await output(first)
        with pytest.raises(RequestError, match="was dropped"):
            await output(second)
        backend.error = None
        assert await output(submit(engine, core, 7)) == [8, 9, 10, 11]
        assert engine.error is None

    run(main)


def test_unusable_logits_end_their_own_request(run: Callable[..., None]) -> None:
    async def main(engine: EngineThread, core: EngineCore, backend: SlowBackend) -> None:
        requests = [submit(engine, core, token) for token in (5, NAN_TOKEN - 2, 7)]
        results = await asyncio.gather(*map(output, requests), return_exceptions=True)
        assert [results[0], results[2]] == [[6, 7, 8, 9], [8, 9, 10, 11]]
        assert isinstance(results[1], RequestError) and "its logits have NaN" in str(results[1])

    run(main)


def test_output_before_an_error_is_not_lost(run: Callable[..., None]) -> None:
    async def main(engine: EngineThread, core: EngineCore, backend: SlowBackend) -> None:
        request = submit(engine, core, NAN_TOKEN - 3)
        while core.scheduler.num_unfinished or not backend.steps:
            await asyncio.sleep(0.005)
        assert (await request.next_chunk()).token_ids == [NAN_TOKEN - 2, NAN_TOKEN - 1, NAN_TOKEN]
        with pytest.raises(RequestError, match="its logits have NaN"):
            await request.next_chunk()

    run(main)


def test_a_lost_gpu_ends_all_requests_with_one_error(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_core, "is_lost", lambda device: True)

    async def main(engine: EngineThread, core: EngineCore, backend: SlowBackend) -> None:
        backend.may_step.clear()
        requests = [submit(engine, core, token) for token in range(1, 6)]
        backend.is_stepping.wait()
        backend.error = RuntimeError("an illegal memory access")
        backend.may_step.set()
        message = "the engine has stopped with every request that it had: RuntimeError: an illegal memory access"
        for request in requests:
            with pytest.raises(EngineError, match=message):
                await output(request)
        with pytest.raises(EngineError, match=message):
            submit(engine, core, 1)
        assert str(engine.error) == message

    run(main, dies=True)


def test_a_core_that_cannot_step_does_not_spin(run: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async def main(engine: EngineThread, core: EngineCore, backend: SlowBackend) -> None:
        def schedule() -> Any:
            raise AssertionError("a bug")

        with monkeypatch.context() as patch:
            patch.setattr(core.scheduler, "schedule", schedule)
            request = submit(engine, core, 1)
            with pytest.raises(EngineError, match="has stopped with every request that it had: AssertionError: a bug"):
                await output(request)
        core.abort(request.sequence)

    run(main)


def test_a_request_that_is_aborted_during_a_step_gets_no_more(run: Callable[..., None]) -> None:
    async def main(engine: EngineThread, core: EngineCore, backend: SlowBackend) -> None:
        backend.may_step.clear()
        request = submit(engine, core, 1)
        backend.is_stepping.wait()
        engine.abort(request)
        engine.abort(request)
        assert engine.abort_id(request.sequence.request_id), "it has not ended yet"
        backend.may_step.set()
        other = submit(engine, core, 5)
        assert await output(other) == [6, 7, 8, 9]
        assert not engine.abort_id(request.sequence.request_id)
        assert len(request.sequence.token_ids) == 2, "the step that ran is its last"

    run(main)


def test_steps_stop_when_nothing_is_open(run: Callable[..., None]) -> None:
    async def main(engine: EngineThread, core: EngineCore, backend: SlowBackend) -> None:
        await output(submit(engine, core, 1))
        num_steps = len(backend.steps)
        await asyncio.sleep(0.05)
        assert len(backend.steps) == num_steps == 4

    run(main)
