"""Several sequences on one engine: none sees another, an earlier owner of its memory, or the order of service."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hf_parity import (
    REFERENCE_BOUND,
    SELF_BOUND,
    Pair,
    Stepper,
    assert_logits_equal,
    generate_greedy,
    greedy_result,
    random_prompt,
    reference_logits,
    relative_error,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen4exp_trt.runtime import SamplingParams
from qwen4exp_trt.runtime.engine_core import EngineCore

PROMPTS = [random_prompt(length, seed=length, eos=(0, length // 2)) for length in (1, 2, 17, 20, 24, 45)]
NUM_TOKENS = 6

Greedy = tuple[list[int], torch.Tensor]


@pytest.fixture(scope="module")
def alone(tiny: Pair) -> list[Greedy]:
    """What each prompt gives when nothing else is served, which is what transformers gives."""
    results = [generate_greedy(tiny.core(), [prompt], NUM_TOKENS)[0] for prompt in PROMPTS]
    for prompt, (tokens, logprobs) in zip(PROMPTS, results, strict=True):
        expected = reference_logits(tiny.reference, prompt + tokens)[len(prompt) - 1 : -1]
        assert_logits_equal(expected.log_softmax(-1), logprobs, REFERENCE_BOUND)
    return results


def assert_same(expected: Sequence[Greedy], got: Sequence[Greedy]) -> None:
    for (expected_tokens, expected_logprobs), (tokens, logprobs) in zip(expected, got, strict=True):
        assert tokens == expected_tokens
        assert relative_error(expected_logprobs, logprobs) <= SELF_BOUND


@pytest.mark.parametrize(
    "limits", [{}, {"prefill_chunk": 7}, {"max_batch_size": 2}, {"max_batch_size": 3, "prefill_chunk": 5}]
)
def test_batch_equals_single_in_any_order(tiny: Pair, alone: list[Greedy], limits: dict[str, int]) -> None:
    """With a small chunk, long prompts are still prefilled while short ones decode; with few slots, some wait."""
    for order in (range(len(PROMPTS)), (5, 1, 3, 0, 4, 2)):
        got = generate_greedy(tiny.core(**limits), [PROMPTS[i] for i in order], NUM_TOKENS)
        assert_same([alone[i] for i in order], got)


def serve_with_arrivals(core: EngineCore, arrivals: Sequence[int], max_tokens: Sequence[int]) -> list[Greedy]:
    """Serve `PROMPTS`, the i-th joining after ``arrivals[i]`` steps."""
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, logprobs=96) for n in max_tokens]
    sequences = [core.make_sequence(None, prompt, one) for prompt, one in zip(PROMPTS, params, strict=True)]
    step, waiting = 0, sorted(range(len(PROMPTS)), key=arrivals.__getitem__)
    while any(sequence.finish_reason is None for sequence in sequences):
        while waiting and (arrivals[waiting[0]] <= step or core.scheduler.num_unfinished == 0):
            core.add(sequences[waiting.pop(0)])
        core.step()
        step += 1
    return [greedy_result(sequence, 96) for sequence in sequences]


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    arrivals=st.lists(st.integers(0, 8), min_size=6, max_size=6),
    max_tokens=st.lists(st.integers(1, NUM_TOKENS), min_size=6, max_size=6),
    chunk=st.integers(1, 30),
    max_batch_size=st.integers(1, 6),
)
@pytest.mark.slow
def test_arrival_order_changes_nothing(
    tiny: Pair, alone: list[Greedy], arrivals: list[int], max_tokens: list[int], chunk: int, max_batch_size: int
) -> None:
    core = tiny.core(prefill_chunk=chunk, max_batch_size=max_batch_size)
    got = serve_with_arrivals(core, arrivals, max_tokens)
    assert_same([(tokens[:n], rows[:n]) for (tokens, rows), n in zip(alone, max_tokens, strict=True)], got)


def test_interleaved_sequences_equal_separate_runs(tiny: Pair) -> None:
    """Two prompts in turns, some tokens each, then one token each."""
    core, sizes = tiny.core(), [3, 1, 9, 6, 5] + [1] * 16
    prompts = [random_prompt(40, seed=seed, eos=(seed, 20)) for seed in (5, 6)]
    steppers = [Stepper(core, prompt) for prompt in prompts]
    pieces = [[stepper.run(size) for stepper in steppers] for size in sizes]
    for prompt, rows in zip(prompts, zip(*pieces, strict=True), strict=True):
        assert_logits_equal(tiny.llm.score(prompt), torch.cat(rows), SELF_BOUND)


def poison(pair: Pair) -> None:
    """Fill every slot and page with what no sequence may read: NaN, and ids and positions far out of range."""
    for state in pair.backend.states.values():
        state.fill_(torch.nan if state.is_floating_point() else 2**30)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 24, 25, 61])
def test_poisoned_memory_changes_nothing(tiny: Pair, length: int) -> None:
    prompt = random_prompt(length, seed=7)
    core = tiny.core(prefill_chunk=10)
    expected = generate_greedy(core, [prompt], 8)[0]
    poison(tiny)
    tokens, logprobs = generate_greedy(core, [prompt], 8)[0]
    assert tokens == expected[0]
    assert torch.equal(logprobs, expected[1])


def test_poisoned_memory_changes_nothing_in_a_batch(tiny: Pair, alone: list[Greedy]) -> None:
    poison(tiny)
    assert_same(alone, generate_greedy(tiny.core(prefill_chunk=7), PROMPTS, NUM_TOKENS))


def test_memory_of_an_aborted_sequence_changes_nothing(tiny: Pair, alone: list[Greedy]) -> None:
    """A stream that is dropped half-way leaves its slot and pages dirty for the next owner."""
    core = tiny.core(max_batch_size=1)
    dropped = core.make_sequence(None, random_prompt(50, seed=8), SamplingParams(temperature=0.0, max_tokens=9))
    core.add(dropped)
    for _ in range(4):
        core.step()
    core.abort(dropped)
    assert_same(alone[3:4], generate_greedy(core, PROMPTS[3:4], NUM_TOKENS))


def test_greedy_runs_repeat_bit_for_bit(tiny: Pair) -> None:
    first, second = (generate_greedy(tiny.core(prefill_chunk=7), PROMPTS, NUM_TOKENS) for _ in range(2))
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(first, second, strict=True):
        assert tokens == other_tokens
        assert torch.equal(logprobs, other_logprobs)
