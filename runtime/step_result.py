"""What a step gives besides the states that it updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen4exp_trt.runtime.sampler import SampledToken, SampleRequest, draw, sample
from qwen4exp_trt.runtime.specs import NEXT_STACK, STACK, TensorSpec


@dataclass(frozen=True)
class StepResult:
    """On the backend's device. It stays what it is when later steps run."""

    logits: Tensor
    """Float32 ``[L, V]``."""
    stack: Tensor | None
    """For the draft head, in the activation dtype: of the model ``[T, HC*H]``, the stack behind its last layer at each
    row of the step; of the draft head ``[L, HC*H]``, its own. None if the program gives none."""


@dataclass(frozen=True)
class SampledStep:
    """The tokens of a step, sampled from its logits, one for each request; None where the logits are unusable."""

    tokens: list[SampledToken | None]
    stack: Tensor | None
    """As that of `StepResult`."""


@dataclass(frozen=True)
class DrawnStep:
    """A step whose tokens are on the device, as is all else. It stays what it is until the backend's next step."""

    drawn: Tensor
    """What `sampler.draw` gives: int32 ``[3, L]``."""
    logits: Tensor
    """``[L, V]``, in any dtype."""
    stack: Tensor | None
    """As that of `StepResult`."""


def real_rows(
    outputs: Sequence[TensorSpec], results: Mapping[str, Tensor], inputs: Mapping[str, Tensor], is_reused: bool
) -> dict[str, Tensor]:
    """The ``results`` of a step without the rows that pad it beyond ``inputs``, which come last.

    They are copies if their memory ``is_reused`` by the next step; views else.
    """
    counts = {"T": len(inputs["input_ids"]), "L": len(inputs["logits_indices"])}
    rows = {spec.name: results[spec.name][: counts[str(spec.shape[0])]] for spec in outputs}
    return {name: value.clone() for name, value in rows.items()} if is_reused else rows


def stack_of(results: Mapping[str, Tensor]) -> Tensor | None:
    """The stack among the outputs of a program, whichever it gives."""
    return results.get(STACK, results.get(NEXT_STACK))


def step_result(results: Mapping[str, Tensor]) -> StepResult:
    """From a step's `real_rows`."""
    return StepResult(results["logits"].to(torch.float32), stack_of(results))


def sampled_step(result: StepResult, requests: Sequence[SampleRequest], vocab_limit: int | None) -> SampledStep:
    """Sample from the first rows of the logits of a step that has run, one for each request."""
    return SampledStep(sample(result.logits[: len(requests)], requests, vocab_limit), result.stack)


def drawn_step(result: StepResult, operands: Mapping[str, Tensor], vocab_limit: int | None) -> DrawnStep:
    """Draw from the logits of a step that has run."""
    logits = result.logits
    there = {name: value.to(logits.device, non_blocking=True) for name, value in operands.items()}
    return DrawnStep(draw(logits, logits, there, vocab_limit), logits, result.stack)
