"""`LLM.generate` of several requests of which some are given up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from serving import generated, ids, loaded_backend

from qwen4exp_trt.errors import DroppedError
from qwen4exp_trt.runtime import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [ids([10 + index] * length) for index, length in enumerate([3, 20, 1, 8, 2])]
"""More than run at a time."""


@pytest.fixture
def expected(llm: LLM) -> list[list[int]]:
    return [generated(output) for output in llm.generate(PROMPTS, GREEDY)]


@contextmanager
def unreadable_token(llm: LLM, token_id: int) -> Iterator[None]:
    """NaN is what prompts with ``token_id`` are made of."""
    embedding = loaded_backend(llm).weights["embed_tokens.weight"]
    row = embedding[token_id].clone()
    embedding[token_id] = torch.nan
    yield
    embedding[token_id] = row


@contextmanager
def failing_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch, *which: int) -> Iterator[None]:
    """The steps of these numbers fail."""
    backend, count = loaded_backend(llm), iter(range(1000))
    run = backend.sample_step

    def fail(*args: Any) -> Any:
        if next(count) in which:
            raise RuntimeError("broken")
        return run(*args)

    with monkeypatch.context() as patch:
        patch.setattr(backend, "sample_step", fail)
        yield


@pytest.mark.parametrize("index", [0, 1, 4])
def test_one_that_is_given_up_leaves_the_others_their_results(llm: LLM, expected: list[list[int]], index: int) -> None:
    with unreadable_token(llm, 10 + index):
        results = llm.generate(PROMPTS, GREEDY)
    assert [result.prompt_token_ids for result in results] == [prompt["prompt_token_ids"] for prompt in PROMPTS]
    failed = results.pop(index)
    assert failed.finished and failed.outputs[0].finish_reason == "error" and failed.outputs[0].token_ids == []
    assert isinstance(failed.error, DroppedError) and "its logits have NaN" in str(failed.error)
    assert [(generated(result), result.error) for result in results] == [
        (tokens, None) for tokens in expected[:index] + expected[index + 1 :]
    ]
    assert {result.outputs[0].finish_reason for result in results} == {"length"}


def test_a_step_that_fails_ends_those_that_it_ran(
    llm: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with failing_steps(llm, monkeypatch, 1):
        results = llm.generate(PROMPTS, GREEDY)
    failed = [result for result in results if result.error is not None]
    assert 1 <= len(failed) <= 3 and all(isinstance(result.error, DroppedError) for result in failed)
    assert "a step failed that it shared with others: RuntimeError: broken" in str(failed[0].error)
    for result, tokens in zip(results, expected, strict=True):
        if result.error is None:
            assert generated(result) == tokens
        else:
            assert generated(result) == tokens[: len(generated(result))] and len(generated(result)) < len(tokens)
    assert "a step failed with its requests" in caplog.text


def test_what_leaves_no_result_is_raised(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with unreadable_token(llm, 10), pytest.raises(DroppedError, match="its logits have NaN"):
        llm.generate(PROMPTS[0], GREEDY)
    with failing_steps(llm, monkeypatch, 0), pytest.raises(RuntimeError, match="broken"):
        llm.generate(PROMPTS[:2], GREEDY)
