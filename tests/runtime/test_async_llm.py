"""The asyncio API over a real (tiny) model: what a user sees."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from serving import assert_idle, generated, ids

from qwen4exp_trt.errors import BundleError, EngineError, QueueFullError, RequestError
from qwen4exp_trt.runtime import LLM, AsyncLLM, SamplingParams, StreamChunk
from qwen4exp_trt.runtime.metrics import HistogramValue

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
PROMPTS = [ids([10 + index] * length) for index, length in enumerate([3, 12, 1, 9, 4])]


@pytest.fixture
def run(tiny_bundle: Path) -> Callable[[Callable[[AsyncLLM], Coroutine[Any, Any, Any]]], Any]:
    """Runs a coroutine function on an `AsyncLLM` of the tiny model, which is idle at the end."""

    def run(main: Callable[[AsyncLLM], Coroutine[Any, Any, Any]], **options: Any) -> Any:
        async def with_llm() -> Any:
            async with AsyncLLM(tiny_bundle, **options) as llm:
                result = await main(llm)
                await until(lambda: is_idle(llm))
                assert_idle(llm._llm)
                return result

        return asyncio.run(with_llm())

    return run


def is_idle(llm: AsyncLLM) -> bool:
    scheduler = llm._llm.core.scheduler
    return scheduler.num_unfinished == 0 and scheduler.num_free_slots == llm.manifest.limits.num_slots


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came true")


async def collect(chunks: AsyncIterator[StreamChunk]) -> list[StreamChunk]:
    return [chunk async for chunk in chunks]


def token_ids(chunks: list[StreamChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def test_many_streams_are_what_the_synchronous_api_gives(run: Any, llm: LLM) -> None:
    params = [GREEDY, SamplingParams(temperature=1.0, seed=3, logprobs=2, max_tokens=9), GREEDY, GREEDY, GREEDY]
    expected = llm.generate(PROMPTS, params)

    async def main(asynchronous: AsyncLLM) -> list[list[StreamChunk]]:
        pairs = zip(PROMPTS, params, strict=True)
        return await asyncio.gather(*(collect(asynchronous.generate(*pair)) for pair in pairs))

    for chunks, output in zip(run(main), expected, strict=True):
        (completion,) = output.outputs
        assert "".join(chunk.text for chunk in chunks) == completion.text
        assert token_ids(chunks) == completion.token_ids
        assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == (completion.finish_reason, completion.stop_reason)
        assert {len(chunk.prompt_token_ids) for chunk in chunks} == {len(output.prompt_token_ids)}
        assert [chunk.metrics is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
        if completion.logprobs is None:
            assert {chunk.logprobs for chunk in chunks} == {None}
        else:
            entries = [entry for chunk in chunks for entry in chunk.logprobs or ()]
            for entry, alone in zip(entries, completion.logprobs, strict=True):
                assert list(entry) == list(alone)  # in other batches sums round otherwise
                assert [each.logprob for each in entry.values()] == pytest.approx(
                    [each.logprob for each in alone.values()], abs=1e-5
                )


def test_complete_returns_the_whole_output_and_its_metrics(run: Any, llm: LLM) -> None:
    (expected,) = llm.generate(PROMPTS[1], GREEDY)
    output = run(lambda asynchronous: asynchronous.complete(PROMPTS[1], GREEDY, request_id="mine"))
    assert (output.request_id, output.finished, generated(output)) == ("mine", True, generated(expected))
    assert output.outputs == expected.outputs
    metrics = output.metrics
    assert metrics.num_output_tokens == 12
    assert 0 <= metrics.queue_time <= metrics.time_to_first_token <= metrics.e2e_latency
    assert 0 < metrics.mean_inter_token_latency <= metrics.max_inter_token_latency


def test_a_slow_consumer_gets_several_steps_at_once(run: Any, llm: LLM) -> None:
    (expected,) = llm.generate(PROMPTS[0], GREEDY)

    async def main(asynchronous: AsyncLLM) -> list[StreamChunk]:
        chunks = asynchronous.generate(PROMPTS[0], GREEDY)
        first = await anext(chunks)
        await until(lambda: not asynchronous._engine._requests)
        return [first, *(await collect(chunks))]

    chunks = run(main)
    assert len(chunks) <= 3, "the last chunk may still be on its way when the others are taken"
    assert token_ids(chunks) == generated(expected)
    assert "".join(chunk.text for chunk in chunks) == expected.outputs[0].text


@pytest.mark.parametrize("how", ["closed", "cancelled", "left"])
def test_a_consumer_that_goes_away_frees_the_memory(run: Any, how: str) -> None:
    async def main(llm: AsyncLLM) -> None:
        async def consume() -> None:
            async for chunk in llm.generate(PROMPTS[0], ENDLESS):
                assert chunk.token_ids
                begun.set()
                if how == "left":
                    break

        begun = asyncio.Event()
        if how == "closed":
            stream = llm.generate(PROMPTS[0], ENDLESS)
            await anext(stream)
            await stream.aclose()
            return
        task = asyncio.create_task(consume())
        await begun.wait()
        if how == "cancelled":
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await task
        await until(lambda: is_idle(llm))
        (aborted,) = [metric for metric in llm.metrics() if metric.name == "qwen4exp_request_success"]
        assert [(sample.labels, sample.value) for sample in aborted.samples] == [({"finished_reason": "abort"}, 1)]

    run(main)


def test_a_consumer_that_is_cancelled_while_it_waits_its_turn(run: Any, llm: LLM) -> None:
    (expected,) = llm.generate(PROMPTS[1], GREEDY)

    async def main(llm: AsyncLLM) -> list[StreamChunk]:
        others = [asyncio.create_task(collect(llm.generate(prompt, ENDLESS))) for prompt in PROMPTS[:3]]
        await until(lambda: llm._llm.core.scheduler.num_running == 3)
        waiting = asyncio.create_task(llm.complete(PROMPTS[3], GREEDY))
        await until(lambda: llm._llm.core.scheduler.num_waiting == 1)
        waiting.cancel()
        await until(lambda: llm._llm.core.scheduler.num_waiting == 0)
        for other in others:
            other.cancel()
        await asyncio.gather(waiting, *others, return_exceptions=True)
        return await collect(llm.generate(PROMPTS[1], GREEDY))

    assert token_ids(run(main)) == generated(expected)


def test_abort_by_id_ends_the_stream_with_a_reason(run: Any) -> None:
    async def main(llm: AsyncLLM) -> None:
        assert not llm.abort("a")
        stream = llm.generate(PROMPTS[0], ENDLESS, request_id="a")
        await anext(stream)
        whole = asyncio.create_task(llm.complete(PROMPTS[1], ENDLESS, request_id="b"))
        await until(lambda: llm.abort("b"))
        assert llm.abort("a")
        assert (await collect(stream))[-1].finish_reason == "abort"
        output = await whole
        assert (output.outputs[0].finish_reason, output.finished) == ("abort", True)

    run(main)


def test_an_error_is_raised_to_its_own_consumer(run: Any, llm: LLM) -> None:
    (expected,) = llm.generate(PROMPTS[0], GREEDY)

    async def main(llm: AsyncLLM) -> None:
        refused = [
            (llm.generate("", GREEDY), "the prompt is empty"),
            (llm.generate(ids([1] * 64), GREEDY), "the prompt has 64 tokens, but this bundle takes at most 63"),
            (llm.generate(ids([1]), "greedy"), "params has 'greedy'; SamplingParams were expected"),
            (llm.generate(ids([1]), GREEDY, priority=1.5), "priority is 1.5; an integer was expected"),
            (llm.generate(ids([1]), GREEDY, request_id=7), "request_id is 7; a str was expected"),
        ]
        stream = llm.generate(PROMPTS[0], GREEDY, request_id="a")
        first = await anext(stream)
        for other, message in [*refused, (llm.generate("x", GREEDY, request_id="a"), "a request 'a' is open already")]:
            with pytest.raises(RequestError, match=message):
                await anext(other)
        assert token_ids([first, *(await collect(stream))]) == generated(expected)

    run(main)


def test_no_more_requests_wait_than_allowed(run: Any) -> None:
    async def main(llm: AsyncLLM) -> None:
        open_ones = [llm.generate(prompt, ENDLESS) for prompt in PROMPTS[:2]]
        for stream in open_ones:
            await anext(stream)
        waiting = asyncio.create_task(collect(llm.generate(PROMPTS[2], GREEDY)))
        await until(lambda: llm._llm.core.scheduler.num_waiting == 1)
        with pytest.raises(QueueFullError, match="3 requests are open, the most that this engine takes at a time"):
            await anext(llm.generate(PROMPTS[3], GREEDY))
        await open_ones.pop().aclose()
        assert len(token_ids(await waiting)) == 12
        await open_ones.pop().aclose()

    run(main, max_num_seqs=2, max_waiting=1)


@pytest.mark.parametrize("wrong", [-1, 1.5, "many"])
def test_limits_that_are_none(tiny_bundle: Path, wrong: Any) -> None:
    with pytest.raises(RequestError, match=r"max_waiting is .*; None .* or an integer of at least 0 was expected"):
        AsyncLLM(tiny_bundle, max_waiting=wrong)


@pytest.mark.parametrize("wrong", [0, 4, "two"])
def test_more_sequences_than_the_bundle_is_built_for(tiny_bundle: Path, wrong: Any) -> None:
    with pytest.raises(BundleError, match=r"max_num_seqs is .*; this bundle runs 1 to 3 sequences at a time"):
        AsyncLLM(tiny_bundle, max_num_seqs=wrong)


def test_event_loops_of_several_threads_share_the_engine(run: Any, llm: LLM) -> None:
    expected = [generated(output) for output in llm.generate(PROMPTS, GREEDY)]

    async def main(llm: AsyncLLM) -> list[list[int]]:
        results: list[list[int]] = [[] for _ in PROMPTS]

        def serve(index: int) -> None:
            results[index] = token_ids(asyncio.run(collect(llm.generate(PROMPTS[index], GREEDY))))

        threads = [threading.Thread(target=serve, args=(index,)) for index in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        return results

    assert run(main) == expected


def test_an_event_loop_that_is_gone_frees_the_memory(run: Any) -> None:
    async def main(llm: AsyncLLM) -> None:
        def serve() -> None:
            loop = asyncio.new_event_loop()
            stream = llm.generate(PROMPTS[0], ENDLESS)
            assert loop.run_until_complete(anext(stream)).token_ids
            loop.close()
            kept.append(stream)

        kept: list[Any] = []
        await asyncio.to_thread(serve)
        await until(lambda: is_idle(llm))

    run(main)


def test_close_lets_requests_finish_or_ends_them(tiny_bundle: Path) -> None:
    async def main(timeout: float) -> StreamChunk:
        llm = AsyncLLM(tiny_bundle)
        stream = llm.generate(PROMPTS[0], GREEDY)
        chunks = [await anext(stream)]
        await llm.close(timeout)
        assert is_idle(llm)
        await llm.close()
        with pytest.raises(EngineError, match="the engine is closed; make a new one"):
            await llm.complete("abc")
        assert str(llm.error) == "the engine is closed; make a new one"
        chunks += await collect(stream)
        assert len(token_ids(chunks)) == (12 if timeout else len(token_ids(chunks)))
        return chunks[-1]

    assert asyncio.run(main(60)).finish_reason == "length"
    assert asyncio.run(main(0)).finish_reason == "abort"


def test_metrics_of_the_engine(run: Any) -> None:
    async def main(llm: AsyncLLM) -> None:
        stream = llm.generate(PROMPTS[1], ENDLESS)
        await anext(stream)
        assert values(llm)["num_requests_running"] == 1
        assert 0 < values(llm)["kv_cache_usage_perc"] <= 1
        await stream.aclose()
        await until(lambda: is_idle(llm))
        await llm.complete(PROMPTS[0], GREEDY)
        await until(lambda: is_idle(llm))
        found = values(llm)
        assert (found["num_requests_running"], found["num_requests_waiting"]) == (0, 0)
        assert found["prompt_tokens"] == 15
        assert found["generation_tokens"] >= 13
        assert found["e2e_request_latency_seconds"] == 2

    def values(llm: AsyncLLM) -> dict[str, float]:
        found = {}
        for metric in llm.metrics():
            value = metric.samples[0].value if metric.samples else 0
            found[metric.name.removeprefix("qwen4exp_")] = (
                value.buckets[-1][1] if isinstance(value, HistogramValue) else value
            )
        return found

    run(main)


def test_an_engine_that_is_dropped_ends_its_thread(tiny_bundle: Path) -> None:
    llm = AsyncLLM(tiny_bundle)
    thread = llm._engine._thread
    assert thread.is_alive()
    del llm
    gc.collect()
    assert not thread.is_alive()
