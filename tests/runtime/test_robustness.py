"""What goes wrong in a long run, each in short: through the asyncio API, over a real (tiny) model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import assert_idle, generated, ids, loaded_backend

from qwen4exp_trt.errors import DroppedError, RequestError
from qwen4exp_trt.runtime import LLM, AsyncLLM, RequestOutput, SamplingParams, StreamChunk

NUM_TOKENS = 14
PARAMS = [
    SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=11, max_tokens=NUM_TOKENS, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=9, seed=12, max_tokens=NUM_TOKENS, ignore_eos=True, repetition_penalty=1.2),
]
PROMPTS = [ids([20 + index, *range(60, 60 + 3 * index)]) for index in range(9)]

Main = Callable[[AsyncLLM], Coroutine[Any, Any, Any]]


@pytest.fixture(scope="module")
def expected(tiny_bundle: Path) -> list[list[int]]:
    """What each prompt with its parameters gives alone."""
    llm = LLM(tiny_bundle, enable_prefix_caching=False)
    return [generated(llm.generate(prompt, params_of(index))[0]) for index, prompt in enumerate(PROMPTS)]


def params_of(index: int) -> SamplingParams:
    return PARAMS[index % len(PARAMS)]


def run(bundle: Path, main: Main, **options: Any) -> Any:
    """What a coroutine function returns, whose engine is idle and has all memory at the end."""

    async def with_llm() -> Any:
        async with AsyncLLM(bundle, **options) as llm:
            result = await main(llm)
        assert_idle(llm._llm)
        return result

    return asyncio.run(with_llm())


@pytest.mark.parametrize(
    ("seed", "options"),
    [(0, {}), (1, {"speculate": "ngram:3"}), (2, {"num_blocks": 6}), (3, {"num_blocks": 6, "speculate": "ngram:3"})],
)
def test_consumers_that_go_at_any_time(
    tiny_bundle: Path, expected: list[list[int]], seed: int, options: dict[str, Any]
) -> None:
    """Before their first step, between chunks, at their last one; the others get what they get alone."""
    rng = random.Random(seed)

    async def consume(llm: AsyncLLM, index: int, num_chunks: int | None) -> list[int] | None:
        tokens: list[int] = []
        stream = llm.generate(PROMPTS[index], params_of(index), priority=index % 2)
        for _ in range(NUM_TOKENS if num_chunks is None else num_chunks):
            chunk = await anext(stream, None)
            tokens += chunk.token_ids if chunk else []
        await stream.aclose()
        return tokens if num_chunks is None else None

    async def main(llm: AsyncLLM) -> list[Any]:
        leaves = [rng.choice([None, None, 0, 1, rng.randrange(NUM_TOKENS), NUM_TOKENS]) for _ in PROMPTS]
        tasks = [asyncio.create_task(consume(llm, index, leave)) for index, leave in enumerate(leaves)]
        for task in rng.sample(tasks, 2):
            await asyncio.sleep(rng.random() / 20)
            task.cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = run(tiny_bundle, main, **options)
    assert len(results) == len(PROMPTS)
    for tokens, alone in zip(results, expected, strict=True):
        assert tokens is None or isinstance(tokens, asyncio.CancelledError) or tokens == alone


def test_too_few_pages_for_all_give_the_same_text(tiny_bundle: Path, expected: list[list[int]]) -> None:
    """Three run until pages run out; then the last one gives way and is computed again."""

    async def main(llm: AsyncLLM) -> list[RequestOutput]:
        pairs = [(prompt, params_of(index)) for index, prompt in enumerate(PROMPTS)]
        return await asyncio.gather(*(llm.complete(*pair) for pair in pairs))

    outputs = run(tiny_bundle, main, num_blocks=6)
    assert [generated(output) for output in outputs] == expected
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


def test_what_can_never_run_is_refused_with_figures(tiny_bundle: Path) -> None:
    async def main(llm: AsyncLLM) -> None:
        message = r"may take 49 tokens, 7 pages of the KV cache, but there are 6; lower max_tokens or give"
        with pytest.raises(RequestError, match=message):
            await llm.complete(ids([1] * 9), SamplingParams(max_tokens=40))
        with pytest.raises(
            RequestError, match=r"the prompt has 64 tokens, but this bundle takes at most 63 \(max_seq_len"
        ):
            await llm.complete(ids([1] * 64))

    run(tiny_bundle, main, num_blocks=6)


def test_a_stop_string_across_tokens_ends_a_stream_before_it(tiny_bundle: Path, llm: LLM) -> None:
    """No chunk shows a part of it."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    (whole,) = llm.generate("the quick", params)
    pieces = [chunk.text for chunk in llm.stream("the quick", params)]
    end = next(index for index in range(3, NUM_TOKENS) if pieces[index] and pieces[index + 1])
    stop = pieces[end][-1] + pieces[end + 1][0]
    before = whole.outputs[0].text[: whole.outputs[0].text.index(stop)]

    async def main(llm: AsyncLLM) -> list[StreamChunk]:
        stopping = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, stop=["never", stop])
        return [chunk async for chunk in llm.generate("the quick", stopping)]

    chunks = run(tiny_bundle, main)
    assert "".join(chunk.text for chunk in chunks) == before
    assert (chunks[-1].finish_reason, chunks[-1].stop_reason) == ("stop", stop)


def test_nan_in_one_request_leaves_the_others(tiny_bundle: Path, expected: list[list[int]]) -> None:
    async def main(llm: AsyncLLM) -> None:
        backend = loaded_backend(llm._llm)
        damaged = llm.generate(PROMPTS[0], params_of(0))
        await anext(damaged)
        others = [asyncio.create_task(llm.complete(PROMPTS[index], params_of(index))) for index in (1, 2)]
        with llm._llm.core.lock:
            (sequence,) = [each for each in llm._llm.core.scheduler.running if each.prompt_token_ids == [20]]
            assert sequence.memory is not None
            backend.states["layers.0.linear_attn.recurrent_state"][sequence.memory.slot] = torch.nan
        with pytest.raises(DroppedError, match="its logits have NaN"):
            async for _ in damaged:
                pass
        assert [generated(await other) for other in others] == expected[1:3]
        assert generated(await llm.complete(PROMPTS[0], params_of(0))) == expected[0], "not from what was damaged"

    run(tiny_bundle, main)
