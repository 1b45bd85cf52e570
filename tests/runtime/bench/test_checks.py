"""Whether a bundle agrees with its program op by op: what is said of one that does, and of one that does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from serving import assert_idle
from torch import Tensor

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime import LLM
from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.bench import checks
from qwen4exp_trt.runtime.bench.checks import check_bundle
from qwen4exp_trt.runtime.bench.loaded import LoadedBundle
from qwen4exp_trt.runtime.sampler import draw
from qwen4exp_trt.runtime.step_result import DrawnStep

Watch = Callable[[int, Tensor, list[int]], Tensor]
ROUNDING = 1e-6
"""An engine adds in another order than the program; relative."""


@pytest.fixture
def bundle(tiny_llm: LLM) -> Iterator[LoadedBundle]:
    yield LoadedBundle(tiny_llm)
    assert_idle(tiny_llm)


def watch_steps(bundle: LoadedBundle, monkeypatch: pytest.MonkeyPatch, watch: Watch) -> None:
    """Other logits for the bundle's steps: what ``watch`` makes of a step's number, its logits and its ids."""
    draw_step, number = bundle.backend.draw_step, iter(range(100))

    def watched(inputs: Any, operands: Any, vocab_limit: int | None) -> DrawnStep:
        step = draw_step(inputs, operands, vocab_limit)
        logits = watch(next(number), step.logits, inputs["input_ids"].tolist())
        return replace(step, logits=logits, drawn=draw(logits, logits, operands, vocab_limit))

    monkeypatch.setattr(bundle.backend, "draw_step", watched)


def test_one_that_agrees(bundle: LoadedBundle) -> None:
    agreement = check_bundle(bundle, with_agreement=True).agreement
    assert agreement is not None
    assert (agreement.tokens, agreement.equal_tokens) == (16, 16)
    assert agreement.logits_error < ROUNDING and agreement.largest_margin is None
    assert agreement.decode_logits_error is not None and agreement.decode_logits_error < ROUNDING


def test_decode_steps_are_compared_on_the_same_tokens(bundle: LoadedBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two have too small a logit for the best token, another has an error that leaves its token. Those of the prompt do
    not count, and the next steps go on with the program's tokens, so that no other differs."""
    first_decode = -(-47 // bundle.limits.prefill_chunk)
    errors, margins, chosen, ran = list[float](), list[float](), list[int](), list[int]()

    def damage(number: int, logits: Tensor, ids: list[int]) -> Tensor:
        allowed = logits[0, : bundle.vocab_limit]
        values, tokens = allowed.topk(2)
        chosen.append(int(tokens[0]))
        ran.append(ids[0])
        token = number - first_decode + 1
        if token < 1:
            return 3 * logits
        if token == 12:
            errors.append(0.5)
            return 1.5 * logits
        if token not in (9, 11):
            return logits
        share = 0.5 if token == 9 else 0.25  # of what is taken from it, the margin
        taken = float(values[0] - values[1]) / share
        other = logits.clone()
        other[0, tokens[0]] -= taken
        errors.append(taken / float(allowed.norm()))
        margins.append(share * len(allowed) ** 0.5)
        return other

    watch_steps(bundle, monkeypatch, damage)
    agreement = check_bundle(bundle, with_agreement=True).agreement
    assert agreement is not None and len(margins) == 2
    assert (agreement.tokens, agreement.equal_tokens) == (16, 14) and agreement.logits_error < ROUNDING
    assert max(errors) == 0.5 and agreement.decode_logits_error == pytest.approx(0.5, rel=1e-4)
    assert agreement.largest_margin == pytest.approx(max(margins), rel=1e-4)
    assert ran[first_decode:] == chosen[first_decode - 1 : -1]


def test_logits_that_are_not_finite_in_a_decode_step_are_refused(
    bundle: LoadedBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch_steps(bundle, monkeypatch, lambda number, logits, ids: logits * (torch.nan if number == 14 else 1))
    with pytest.raises(BundleError, match="its logits have NaN"):
        check_bundle(bundle, with_agreement=True)


def test_a_prompt_of_which_the_program_alone_has_no_finite_logits_is_refused(
    bundle: LoadedBundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Damaged(EagerBackend):
        def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
            return torch.nan * super().run(inputs)

    monkeypatch.setattr(checks, "EagerBackend", Damaged)
    with pytest.raises(BundleError, match="the logits behind token 0 of a prompt of random ids are not finite"):
        check_bundle(bundle, with_agreement=True)
