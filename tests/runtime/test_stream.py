from __future__ import annotations

from typing import Any

import pytest
import torch
from serving import assert_idle, loaded_backend

from qwen4exp_trt.errors import RequestError
from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.outputs import StreamChunk
from qwen4exp_trt.runtime.sequence import Sequence

LONG = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
PROMPTS: list[Any] = [{"prompt_token_ids": [10 + index] * length} for index, length in enumerate([3, 12, 1, 9, 4])]


def token_ids(chunks: list[StreamChunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.token_ids]


def generated(llm: LLM, prompt: Any, params: SamplingParams) -> list[int]:
    return llm.generate(prompt, params)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    "params",
    [
        LONG,
        SamplingParams(temperature=1.0, seed=5, max_tokens=30, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, stop=["e", "t"]),
        SamplingParams(temperature=1.0, seed=6, max_tokens=30, skip_special_tokens=False),
    ],
    ids=["greedy", "seeded", "stop strings", "eos"],
)
def test_stream_is_generate_in_pieces(llm: LLM, params: SamplingParams) -> None:
    chunks = list(llm.stream("the quick brown", params))
    output = llm.generate("the quick brown", params)[0].outputs[0]
    assert "".join(chunk.text for chunk in chunks) == output.text
    assert token_ids(chunks) == output.token_ids
    assert {len(chunk.token_ids) for chunk in chunks} == {1}, "one token a step"
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [output.finish_reason]


def test_request_is_checked_when_it_is_made_and_queued_when_it_is_read(llm: LLM) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.stream("", LONG)
    with pytest.raises(RequestError, match="2 SamplingParams for 1 prompts"):
        llm.stream("a", [LONG, LONG])  # pyright: ignore[reportArgumentType]
    with pytest.raises(RequestError, match="neither text nor a dict"):
        llm.stream(["a"], LONG)  # pyright: ignore[reportArgumentType]
    unread = llm.stream("a", LONG)
    assert_idle(llm)
    del unread


def test_closing_early_frees_the_memory(llm: LLM) -> None:
    streams = [llm.stream(prompt, LONG) for prompt in PROMPTS[:3]]
    for stream in streams:
        next(stream)
    assert llm.core.scheduler.num_free_slots == 0
    streams[0].close()
    assert llm.core.scheduler.num_free_slots == 1
    del stream, streams
    assert_idle(llm)


def test_a_loop_that_is_left_frees_the_memory(llm: LLM) -> None:
    for chunk in llm.stream(PROMPTS[0], LONG):
        assert chunk.token_ids
        break
    assert_idle(llm)


def test_interleaved_streams_get_all_of_their_own_tokens(llm: LLM) -> None:
    """Each step of one stream advances the others, also to their end."""
    expected = [generated(llm, prompt, params) for prompt, params in zip(PROMPTS[:3], (LONG, SHORT, LONG), strict=True)]
    streams = [llm.stream(prompt, params) for prompt, params in zip(PROMPTS[:3], (LONG, SHORT, LONG), strict=True)]
    first: list[list[StreamChunk]] = [[next(stream)] for stream in streams]
    first[0] += list(streams[0])
    rest = [list(stream) for stream in streams]
    assert [chunk.finish_reason for chunk in rest[1]] == ["length"], "one chunk with all that came meanwhile"
    for begun, ended, tokens in zip(first, rest, expected, strict=True):
        assert token_ids([*begun, *ended]) == tokens


def test_streams_in_turns(llm: LLM) -> None:
    expected = [generated(llm, prompt, SHORT) for prompt in PROMPTS[:2]]
    pairs = list(zip(*(llm.stream(prompt, SHORT) for prompt in PROMPTS[:2]), strict=False))
    assert [token_ids([chunk]) for pair in pairs for chunk in pair][:2] == [expected[0][:1], expected[1][:1]]
    assert all(chunk.token_ids for pair in pairs for chunk in pair)


def test_generate_and_score_while_streams_are_open(llm: LLM) -> None:
    expected = [generated(llm, prompt, LONG) for prompt in PROMPTS]
    scores = llm.score([5, 6, 7])
    stream = llm.stream(PROMPTS[0], LONG)
    begun = [next(stream)]
    assert torch.equal(llm.score([5, 6, 7]), scores)
    results = llm.generate(PROMPTS[1:], SHORT)
    assert [result.outputs[0].token_ids for result in results] == [tokens[:5] for tokens in expected[1:]]
    assert llm.core.scheduler.num_unfinished == 1, "the open stream is not run to its end"
    assert token_ids([*begun, *stream]) == expected[0]


def test_streams_that_hold_every_slot_do_not_block_others(llm: LLM) -> None:
    expected = [generated(llm, prompt, LONG) for prompt in PROMPTS]
    streams = [llm.stream(prompt, LONG) for prompt in PROMPTS[:3]]
    begun = [[next(stream)] for stream in streams]
    with pytest.raises(RequestError, match="3 open requests leave no slot or too few pages to score 1 tokens"):
        llm.score([5])
    (result,) = llm.generate(PROMPTS[3], LONG)
    assert result.outputs[0].token_ids == expected[3], "it waited until one of them was done"
    for chunks, stream, tokens in zip(begun, streams, expected, strict=False):
        assert token_ids([*chunks, *stream]) == tokens


def test_work_per_chunk_does_not_grow_with_the_output(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def request_output(self: Sequence) -> None:
        raise AssertionError("copies the whole output")

    monkeypatch.setattr(Sequence, "request_output", request_output)
    assert len(token_ids(list(llm.stream(PROMPTS[0], LONG)))) == 14


def test_a_failing_step_ends_every_stream_that_it_ran(llm: LLM) -> None:
    backend = loaded_backend(llm)
    (head,) = (weight for name, weight in backend.weights.items() if name.startswith("lm_head"))
    healthy = head[0].clone()
    streams = [llm.stream(prompt, LONG) for prompt in PROMPTS[:2]]
    for stream in (*streams, streams[0], streams[0]):
        next(stream)
    head[0] = torch.nan
    with pytest.raises(RequestError, match="NaN"):
        list(streams[0])
    head[0] = healthy
    shown = token_ids([next(streams[1])])
    assert shown == generated(llm, PROMPTS[1], LONG)[1:2], "what it had before is not lost"
    with pytest.raises(RequestError, match="was dropped: its logits have NaN"):
        next(streams[1])
    assert_idle(llm)
    assert generated(llm, PROMPTS[0], SHORT)


def test_an_interrupt_ends_the_stream_and_frees_its_memory(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)

    def interrupt(*step: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llm.core.backend, "sample_step", interrupt)
        next(stream)
    assert_idle(llm)


@pytest.mark.trt
def test_demo_text_comes_in_whole_characters(demo_llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=0, max_tokens=20, ignore_eos=True)
    chunks = list(demo_llm.stream("Once upon a time", params))
    output = demo_llm.generate("Once upon a time", params)[0].outputs[0]
    assert "".join(chunk.text for chunk in chunks) == output.text
    assert token_ids(chunks) == output.token_ids
