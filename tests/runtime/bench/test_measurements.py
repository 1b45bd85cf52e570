"""How steps and prompts are counted and timed, by a clock that a test turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import assert_idle

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime import LLM
from qwen4exp_trt.runtime.bench import loaded, rates
from qwen4exp_trt.runtime.bench.cases import (
    EFFORTS,
    DecodeCase,
    GenerateCase,
    PrefillCase,
    StepKind,
    longest_context,
)
from qwen4exp_trt.runtime.bench.decode import measure_decode
from qwen4exp_trt.runtime.bench.generate import measure_generate
from qwen4exp_trt.runtime.bench.loaded import LoadedBundle
from qwen4exp_trt.runtime.bench.prefill import measure_prefill
from qwen4exp_trt.runtime.bench.rates import measure_bandwidth, measure_matmul_rate
from qwen4exp_trt.runtime.specs import StateKind

EFFORT = replace(EFFORTS["quick"], iterations=5, warm_up=2, seconds=1e9)


@pytest.fixture(scope="module")
def llm(mtp_bundle: Path) -> LLM:
    return LLM(mtp_bundle, speculate="mtp:2", enable_prefix_caching=False)


@pytest.fixture
def bundle(llm: LLM) -> Iterator[LoadedBundle]:
    yield LoadedBundle(llm)
    assert_idle(llm)


def ticking() -> Iterator[float]:
    return iter(map(float, count()))


class StepClock:
    """Stands still but for the steps of a bundle, each of which takes the next of ``seconds``."""

    def __init__(self, bundle: LoadedBundle, monkeypatch: pytest.MonkeyPatch, *seconds: float) -> None:
        self.now, left, sample_step = 0.0, iter(seconds), bundle.backend.sample_step

        def sample(*args: Any) -> Any:
            self.now += next(left)
            return sample_step(*args)

        monkeypatch.setattr(bundle.backend, "sample_step", sample)

    def __call__(self) -> float:
        return self.now


def test_what_counts_comes_behind_the_first_step_and_those_to_warm_up(
    bundle: LoadedBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = StepClock(bundle, monkeypatch, 9, 7, 7, 1, 2, 3, 4, 20)
    times = measure_decode(bundle, DecodeCase(2, 20), EFFORT, clock)
    assert times.first_step_ms == 9000
    step = times.step_ms
    assert (step.median, step.least, step.most, step.count) == (3000, 1000, 20_000, 5)


def test_of_a_prompt_the_first_run_does_not_count(bundle: LoadedBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is of two chunks at most; the others are of three here."""
    clock = StepClock(bundle, monkeypatch, 50, 50, 1, 2, 4, 2, 3, 6)
    times = measure_prefill(bundle, PrefillCase(20), EFFORT, clock)
    assert (times.first_run_ms, times.enqueue_ms, times.chunks) == (100_000, 2000, (8, 8, 4))
    assert (times.first_token_ms.least, times.first_token_ms.most, times.first_token_ms.count) == (7000, 11_000, 2)


def test_states_of_a_long_context_are_random(bundle: LoadedBundle) -> None:
    states = bundle.core(20).states.pool
    for spec in states.specs:
        if spec.is_paged:
            assert states[spec.name].float().std() > 0.5, spec.name


def test_a_slow_case_ends_with_few_steps(bundle: LoadedBundle) -> None:
    slow = measure_decode(bundle, DecodeCase(2, 20), replace(EFFORT, seconds=1), ticking().__next__)
    assert slow.step_ms.count == EFFORT.least == 3


def test_a_prompt_that_takes_long_is_computed_once(bundle: LoadedBundle) -> None:
    clock = ticking().__next__
    assert measure_prefill(bundle, PrefillCase(20), replace(EFFORT, seconds=3), clock).first_token_ms.count == 1
    assert measure_prefill(bundle, PrefillCase(20), replace(EFFORT, runs=4), clock).first_token_ms.count == 4


@pytest.mark.parametrize("kind", list(StepKind))
def test_every_step_has_the_rows_of_its_case(
    bundle: LoadedBundle, kind: StepKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the context of the case, and each sequence with all its drafts, however many are in vain."""
    backend, seen = bundle.backend, list[tuple[list[int], list[int]]]()
    sample_step = backend.sample_step

    def watched(inputs, requests, vocab_limit):
        starts = inputs["query_start_loc"].diff().tolist()
        seen.append((starts, (inputs["seq_lens"] - torch.tensor(starts)).tolist()))
        return sample_step(inputs, requests, vocab_limit)

    monkeypatch.setattr(backend, "sample_step", watched)
    monkeypatch.setattr("qwen4exp_trt.runtime.drafts.acceptance.GIVE_UP_AFTER", 2)
    drafts = 0 if kind is StepKind.PLAIN else 2
    measure_decode(bundle, DecodeCase(2, 16, kind, drafts), EFFORT)
    assert seen[0] == ([1, 1], [16, 16]), "the first step has no drafts yet"
    assert len(seen) == 1 + EFFORT.warm_up + EFFORT.iterations
    assert all(rows == [1 + drafts] * 2 for rows, _ in seen[1:])


def test_a_full_batch_of_the_longest_runs_together(bundle: LoadedBundle) -> None:
    effort = replace(EFFORT, iterations=3, warm_up=1)
    context = longest_context(effort, bundle.room)
    assert measure_decode(bundle, DecodeCase(4, context), effort).tokens_per_step == 4
    with pytest.raises(BundleError, match="only 3 of 4 sequences were in a step: there are too few pages"):
        measure_decode(bundle, DecodeCase(4, 57), replace(effort, iterations=1, warm_up=0))


def test_logits_that_are_not_finite_fail_the_case(bundle: LoadedBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    fill_slots = loaded.fill_slots

    def damaged(states, context, vocab_size):
        fill_slots(states, context, vocab_size)
        for spec in states.specs:
            if spec.kind is StateKind.RECURRENT_STATE:
                states[spec.name].fill_(torch.nan)

    monkeypatch.setattr(loaded, "fill_slots", damaged)
    with pytest.raises(BundleError, match="its logits have NaN"):
        measure_decode(bundle, DecodeCase(1, 20), EFFORT)


def test_requests_with_and_without_drafts(bundle: LoadedBundle) -> None:
    plain = measure_generate(bundle, GenerateCase(2, 6, 8), replace(EFFORT, runs=1))
    drafted = measure_generate(bundle, GenerateCase(2, 6, 8, with_drafts=True), EFFORT)
    assert plain.accepted_drafts is None and drafted.accepted_drafts is not None
    assert drafted.seconds.count == EFFORT.runs and drafted.first_token_ms.count == 2 * EFFORT.runs
    assert plain.output_tokens_per_second.median == pytest.approx(2 * 8 / plain.seconds.median)
    from_request_to_end = plain.first_token_ms.median + 7 * plain.between_tokens_ms.median
    assert 0.5 < from_request_to_end / (1e3 * plain.seconds.median) < 1
    assert 0.1 < plain.first_token_ms.median / plain.between_tokens_ms.median < 100, "both are of one step"
    assert plain.device_step_ms is None and plain.host_ms is None, "there is no GPU"
    assert bundle.llm.core.drafting is not None, "as it was"


def test_the_first_call_does_not_count(bundle: LoadedBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StepClock(bundle, monkeypatch, *[50] * 4, *[1] * 4, *[2] * 4)
    times = measure_generate(bundle, GenerateCase(2, 6, 4), EFFORT, clock)
    assert (times.seconds.least, times.seconds.most, times.seconds.count) == (4, 8, 2)


def test_rates_of_this_machine() -> None:
    bandwidth = measure_bandwidth("cpu", free_bytes=64 << 20)
    assert bandwidth.copy > 0 and bandwidth.read > 0
    assert measure_matmul_rate("cpu") > 0


def test_what_rates_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that a copy reads and writes, those that a read reads, products and sums; an eighth of what is free."""
    monkeypatch.setattr(rates, "median_seconds", lambda work, device: 2.0)
    assert measure_bandwidth("cpu", free_bytes=64 << 20) == rates.Bandwidth(copy=8 << 20, read=4 << 20)
    assert measure_matmul_rate("cpu") == 1024**3


def test_a_rate_is_of_the_median_run_behind_a_first(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, runs = iter([7.0, 1.0, 2.0, 3.0, 4.0, 99.0, 98.0]), list[str]()
    monkeypatch.setattr(rates, "_cpu_seconds", lambda work: next(seconds))
    assert rates.median_seconds(lambda: runs.append("first"), "cpu") == 4
    assert runs == ["first"]
