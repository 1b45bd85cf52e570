"""What would fit: the choices that make a plan smaller, tried one at a time, then in pairs, and so on."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

from qwen4exp_trt.builder.plan import PlanRequest, make_plan
from qwen4exp_trt.runtime.specs import PleResidency


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
    Move(
        "--draft-head",
        lambda request: ("none",) if request.config.has_draft_head else (),
        lambda request, _: replace(request, config=request.config.without_draft_head()),
    ),
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
    """The options that make a plan fit which does not: as few as are enough, in each combination of that many.

    Of an option with several values it is the one that gives up least; if there are others before it in the
    combination, these have their smallest. Empty if all of them together are not enough.
    """
    request = replace(request, choose_formats=cache(request.choose_formats))
    for count in range(1, len(MOVES) + 1):
        found = [options for chosen in combinations(MOVES, count) for options in _fit(request, chosen)]
        if found:
            return found
    return []


def _fit(request: PlanRequest, moves: Sequence[Move]) -> Iterator[tuple[str, ...]]:
    """The options of ``moves`` with the values with which the request fits; none if it does not."""
    move, *others = moves
    values = move.values(request)

    def fits(value: Any) -> bool:
        return not make_plan(move.apply(request, value)).missing_bytes

    if not values:
        return
    if others:
        for options in _fit(move.apply(request, values[-1]), others):
            yield f"{move.option} {values[-1]}", *options
    elif fits(values[-1]):
        yield (f"{move.option} {values[bisect_left(values, True, key=fits)]}",)
