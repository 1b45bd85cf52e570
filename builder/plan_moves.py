"""What would fit: the choices that make a plan smaller, tried one at a time and in pairs."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

from qwen4exp_trt.builder.plan import PlanRequest, PleResidency, make_plan


@dataclass(frozen=True)
class Move:
    """An option of the command with values that need less memory."""

    option: str
    values: Callable[[PlanRequest], Sequence[Any]]
    """Those to choose from, each needing no more than the one before."""
    apply: Callable[[PlanRequest, Any], PlanRequest]


def _with_limits(request: PlanRequest, **changes: int) -> PlanRequest:
    limits = replace(request.limits, **changes)
    return replace(request, limits=replace(limits, prefill_chunk=min(limits.prefill_chunk, limits.max_seq_len)))


def _elsewhere(request: PlanRequest) -> tuple[PleResidency]:
    is_unified = request.device is not None and request.device.is_unified
    return (PleResidency.DISK if is_unified else PleResidency.HOST,)


def _shorter(request: PlanRequest) -> range:
    """Whole pages."""
    page = request.limits.block_size
    return range((request.limits.max_seq_len - 1) // page * page, 0, -page)


MOVES = (
    Move("--ple-residency", _elsewhere, lambda request, residency: replace(request, ple_residency=residency)),
    Move("--ple", lambda request: ("nvfp4",), lambda request, ple: replace(request, ple=ple)),
    Move("--precision", lambda request: ("nvfp4",), lambda request, precision: replace(request, precision=precision)),
    Move(
        "--kv-cache-dtype",
        lambda request: ("fp8",),
        lambda request, _: replace(request, kv_cache_dtype="float8_e4m3fn"),
    ),
    Move(
        "--max-batch-size",
        lambda request: range(request.limits.max_batch_size - 1, 0, -1),
        lambda request, size: _with_limits(request, max_batch_size=size),
    ),
    Move("--max-seq-len", _shorter, lambda request, length: _with_limits(request, max_seq_len=length)),
)
"""Activation memory stays what it is, though fewer tokens of a step need less of it."""


def fitting_moves(request: PlanRequest) -> list[tuple[str, ...]]:
    """The options that make a plan fit which does not: each alone that does, or, if none does, each pair.

    Of an option with several values it is the one that gives up least, in a pair for the second option while the first
    one has its smallest. Empty if no pair is enough.
    """
    request = replace(request, choose_formats=cache(request.choose_formats))
    alone = [(option,) for move in MOVES for option in _mildest(request, move)]
    return alone or list(_fitting_pairs(request))


def _fitting_pairs(request: PlanRequest) -> Iterator[tuple[str, str]]:
    for first, second in combinations(MOVES, 2):
        for value in first.values(request)[-1:]:
            for option in _mildest(first.apply(request, value), second):
                yield f"{first.option} {value}", option


def _mildest(request: PlanRequest, move: Move) -> Iterator[str]:
    """The first value that fits, if the last one does."""
    values = move.values(request)

    def fits(value: Any) -> bool:
        return not make_plan(move.apply(request, value)).missing_bytes

    if values and fits(values[-1]):
        yield f"{move.option} {values[bisect_left(values, True, key=fits)]}"
