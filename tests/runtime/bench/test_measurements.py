"""How steps and prompts are counted and timed, by a clock that a test turns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from serving import assert_idle

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime import LLM
from qwen4exp_trt.runtime.bench import loaded
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


def test_a_slow_case_ends_with_few_steps(bundle: LoadedBundle) -> None:
    case = DecodeCase(2, 20)
    assert measure_decode(bundle, case, EFFORT, ticking().__next__).step_ms.count == 5
    slow = measure_decode(bundle, case, replace(EFFORT, seconds=1), ticking().__next__)
    assert slow.step_ms.count == EFFORT.least == 3
    assert slow.step_ms.median == slow.first_step_ms == 1000, "a tick a step"


def test_a_prompt_that_takes_long_is_computed_once(bundle: LoadedBundle) -> None:
    clock = ticking().__next__
    assert measure_prefill(bundle, PrefillCase(20), replace(EFFORT, seconds=3), clock).first_token_ms.count == 1
    runs = measure_prefill(bundle, PrefillCase(20), replace(EFFORT, runs=4), clock)
    assert runs.first_token_ms.count == 4 and runs.chunks == (8, 8, 4)
    assert runs.first_token_ms.median > runs.first_run_ms > 0, "of two chunks"


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
    plain = measure_generate(bundle, GenerateCase(2, 6, 8), EFFORT)
    drafted = measure_generate(bundle, GenerateCase(2, 6, 8, with_drafts=True), EFFORT)
    assert plain.accepted_drafts is None and drafted.accepted_drafts is not None
    assert plain.seconds.count == EFFORT.runs and plain.first_token_ms.count == 2 * EFFORT.runs
    assert plain.output_tokens_per_second.median == pytest.approx(2 * 8 / plain.seconds.median, rel=0.5)
    assert plain.device_step_ms is None and plain.host_ms is None, "there is no GPU"
    assert bundle.llm.core.drafting is not None, "as it was"


def test_rates_of_this_machine() -> None:
    bandwidth = measure_bandwidth("cpu", free_bytes=64 << 20)
    assert bandwidth.copy > 0 and bandwidth.read > 0
    assert measure_matmul_rate("cpu") > 0
