"""What is looked at before anything is timed: whether logits are finite, and whether another execution agrees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.bench.loaded import LoadedBundle, check_sequences
from qwen4exp_trt.runtime.program_backend import ProgramBackend
from qwen4exp_trt.runtime.sampler import SampleRequest, greedy_operands, report
from qwen4exp_trt.runtime.side_by_side import relative_rms
from qwen4exp_trt.runtime.step_result import SampledStep

_PROMPT, _OUTPUT = 48, 16
"""Tokens."""


@dataclass(frozen=True)
class Agreement:
    """With the bundle's program, executed op by op on the same device, weights and states: behind a prompt of random
    ids, in the serving loop, both on the tokens that it chose greedily."""

    tokens: int
    """That each chose: the first behind the prompt, the others in decode steps."""
    equal_tokens: int
    """Of them, those that both chose."""
    logits_error: float
    """Relative RMS of the prompt's logits."""
    decode_logits_error: float | None
    """The same of a decode step, the largest; None without any."""
    largest_margin: float | None
    """Of the tokens that differ: by how much the program prefers its own, in RMS of the differences of their logits, at
    most. A few are a near tie that rounding turned, many an error; None if all are equal."""


@dataclass(frozen=True)
class Checked:
    """Before the times."""

    finite_logits: int
    """Rows of logits of a prompt of random ids, all finite."""
    agreement: Agreement | None
    """None if it was not asked for."""


def check_bundle(bundle: LoadedBundle, with_agreement: bool) -> Checked:
    """`BundleError` for logits that are not finite, or if there is nothing to compare with."""
    length = max(1, min(_PROMPT, bundle.limits.max_seq_len - _OUTPUT - 1))
    ids = bundle.random_ids(length)
    logits = bundle.core().score(ids)
    _check_finite(logits)
    return Checked(len(logits), _compare(bundle, ids, logits) if with_agreement else None)


def check_can_compare(backend: str, device: torch.device) -> None:
    """`BundleError` if ``--check`` would compare the backend with itself."""
    if backend == "eager" and device.type == "cpu":
        raise BundleError(
            "--check compares with the program executed op by op, which is what the backend 'eager' does on the CPU; "
            "leave it out"
        )


def _check_finite(logits: Tensor) -> None:
    wrong = (~logits.isfinite()).any(1).nonzero().flatten().tolist()
    if wrong:
        raise BundleError(
            f"the logits behind token {wrong[0]} of a prompt of random ids are not finite: the weights or the engine "
            "are damaged; qwen4exp-generate --debug-nan says in which module it begins"
        )


def _compare(bundle: LoadedBundle, ids: list[int], logits: Tensor) -> Agreement:
    """Of a prompt ``ids``, whose ``logits`` are the bundle's."""
    own = bundle.backend
    program = EagerBackend(own.program, own.states, own.weights, bundle.limits, own.device, own.rows)
    program.watch_nan()
    prompt_logits = bundle.core(backend=program).score(ids)
    _check_finite(prompt_logits)
    expected = _Guided(program)
    _generate(bundle, expected, ids)
    found = _Guided(own, expected.tokens)
    _generate(bundle, found, ids)
    pairs = list(zip(expected.logits, found.logits, strict=True))
    chosen = list(zip(expected.tokens, found.tokens, pairs, strict=True))
    margins = [_margin(*both, token, other) for token, other, both in chosen if token != other]
    return Agreement(
        tokens=len(chosen),
        equal_tokens=len(chosen) - len(margins),
        logits_error=relative_rms(prompt_logits, logits),
        decode_logits_error=max((relative_rms(*both) for both in pairs[1:]), default=None),
        largest_margin=max(margins, default=None),
    )


def _margin(expected: Tensor, found: Tensor, token: int, other: int) -> float:
    """By how much ``expected`` prefers ``token`` to ``other``, in RMS of what lies between it and ``found``."""
    return float((expected[token] - expected[other]) / (expected - found).square().mean().sqrt())


class _Guided:
    """A backend for one greedy sequence, which goes on with the tokens of a ``guide``, or without one with its own. Its
    own and their logits are kept."""

    def __init__(self, backend: ProgramBackend, guide: Sequence[int] | None = None) -> None:
        self.device, self.states, self.run, self.prefetch = (
            backend.device,
            backend.states,
            backend.run,
            backend.prefetch,
        )
        self._backend, self._guide = backend, guide
        self.tokens: list[int] = []
        self.logits: list[Tensor] = []
        """Float32 ``[V]`` each, of the ids that a text may have."""

    def sample_step(
        self, inputs: Mapping[str, Tensor], requests: Sequence[SampleRequest], vocab_limit: int | None
    ) -> SampledStep:
        step = self._backend.draw_step(inputs, greedy_operands(len(inputs["logits_indices"])), vocab_limit)
        sampled = report(step.drawn.cpu(), step.logits, requests, vocab_limit)
        for row, token in enumerate(sampled):
            if token is not None:
                self.logits.append(step.logits[row, :vocab_limit].float().clone())
                self.tokens.append(token.token_id)
                if self._guide is not None:
                    token.token_id = self._guide[len(self.tokens) - 1]
        return SampledStep(sampled, None)


def _generate(bundle: LoadedBundle, backend: _Guided, ids: list[int]) -> None:
    core = bundle.core(backend=backend)
    (sequence,) = bundle.add(core, [ids], most=min(_OUTPUT, bundle.limits.max_seq_len - len(ids)))
    while sequence.finish_reason is None and sequence.error is None:
        core.step()
    core.abort(sequence)
    check_sequences([sequence])
