"""The facts that passes require and ensure: name -> a check that returns what violates it, or None."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from qwen4exp_trt.passes.patterns import (
    ATEN,
    find_foldable,
    find_hc_projections,
    is_dead,
    match_gated_mix,
    match_hc_read,
    match_linear_concat,
    match_pending_combine,
    q4e_op,
)
from qwen4exp_trt.runtime.program import Program


def _pending_combines(program: Program) -> Iterator[str]:
    norms = program.graph.find_nodes(op="call_function", target=q4e_op("hc_norm"))
    return (f"{norm.name} reads a pending combine" for norm in norms if match_pending_combine(norm))


def _split_hc_projections(program: Program) -> Iterator[str]:
    return (f"{found.lowrank.name} and {found.inject.name} read one stack" for found in find_hc_projections(program))


def _split_mixes(program: Program) -> Iterator[str]:
    mixes = program.graph.find_nodes(op="call_function", target=q4e_op("hc_mix"))
    return (f"{mix.name} reads a projection of its own" for mix in mixes if match_gated_mix(mix))


def _split_reads(program: Program) -> Iterator[str]:
    mixes = program.graph.find_nodes(op="call_function", target=q4e_op("hc_gate_mix"))
    return (f"{mix.name} ends a read of several ops" for mix in mixes if match_hc_read(mix))


def _split_projections(program: Program) -> Iterator[str]:
    concats = program.graph.find_nodes(op="call_function", target=ATEN.cat.default)
    return (f"{concat.name} joins projections of one input" for concat in concats if match_linear_concat(concat))


def _weight_expressions(program: Program) -> Iterator[str]:
    return (f"{node.name} reads weights alone" for node in find_foldable(program))


def _dead_code(program: Program) -> Iterator[str]:
    yield from (f"nothing reads {node.name}" for node in program.calls() if is_dead(node))
    placeholders = program.placeholders()
    yield from (f"nothing reads {spec.name}" for spec in program.weights if not placeholders[spec.name].users)


_VIOLATIONS: dict[str, Callable[[Program], Iterator[str]]] = {
    "combines_fused": _pending_combines,
    "hc_projections_merged": _split_hc_projections,
    "hc_mixes_fused": _split_mixes,
    "hc_reads_fused": _split_reads,
    "projections_merged": _split_projections,
    "weights_folded": _weight_expressions,
    "no_dead_code": _dead_code,
}
FACTS = frozenset(_VIOLATIONS)


def find_violation(fact: str, program: Program) -> str | None:
    """What contradicts ``fact`` in ``program``, or None."""
    return next(_VIOLATIONS[fact](program), None)
