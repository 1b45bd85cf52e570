"""What is looked at before anything is timed: whether logits are finite, and whether another execution agrees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.bench.loaded import LoadedBundle, check_sequences
from qwen4exp_trt.runtime.engine_core import EngineCore
from qwen4exp_trt.runtime.side_by_side import relative_rms

_PROMPT, _OUTPUT = 48, 16
"""Tokens."""


@dataclass(frozen=True)
class Agreement:
    """With the bundle's program, executed op by op on the same device, weights and states."""

    tokens: int
    """That both generated, greedily, behind a prompt of random ids."""
    equal_tokens: int
    """Those before the first that differs."""
    logits_error: float
    """Relative RMS of the prompt's logits."""


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
    agreement = None
    if with_agreement:
        other = _core_op_by_op(bundle)
        found, expected = _greedy(bundle, bundle.core(), ids), _greedy(bundle, other, ids)
        expected_logits = other.score(ids)
        _check_finite(expected_logits)
        equal = next((i for i, pair in enumerate(zip(found, expected, strict=True)) if pair[0] != pair[1]), len(found))
        agreement = Agreement(len(found), equal, relative_rms(expected_logits, logits))
    return Checked(len(logits), agreement)


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


def _core_op_by_op(bundle: LoadedBundle) -> EngineCore:
    own = bundle.backend
    program = EagerBackend(own.program, own.states, own.weights, bundle.limits, own.device, own.rows)
    program.watch_nan()
    vocab_size = bundle.manifest.vocab_size
    return EngineCore(program, bundle.limits, bundle.num_blocks, vocab_size, (), bundle.tokenizer)


def _greedy(bundle: LoadedBundle, core: EngineCore, ids: list[int]) -> list[int]:
    (sequence,) = bundle.add(core, [ids], most=min(_OUTPUT, bundle.limits.max_seq_len - len(ids)))
    while sequence.finish_reason is None and sequence.error is None:
        core.step()
    core.abort(sequence)
    check_sequences([sequence])
    return sequence.token_ids[len(ids) :]
