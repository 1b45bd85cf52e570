"""What every program must satisfy between passes, whatever the passes do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from qwen4exp_trt.errors import PassError
from qwen4exp_trt.plugins.registry import spec_of
from qwen4exp_trt.runtime.program import Program, is_getitem
from qwen4exp_trt.runtime.program_text import ATEN_OPS, op_name


def check_legality(program: Program, where: str) -> None:
    """Raise `PassError` naming the first rule that ``program`` breaks."""
    try:
        program.graph.lint()
    except RuntimeError as error:
        raise PassError(f"{where} is not legal: {str(error).splitlines()[0]}") from error
    violation = next(_violations(program), None)
    if violation is not None:
        raise PassError(f"{where} is not legal: {violation}")


def _violations(program: Program) -> Iterator[str]:
    yield from _placeholder_violations(program)
    for node in program.calls():
        if node.meta.get("val") is None:
            yield f"{node.name} has no shape and dtype"
        if node.kwargs:
            yield f"{node.name} takes {sorted(node.kwargs)} by keyword, where every argument goes by position"
        if not is_getitem(node) and spec_of(node.target) is None and op_name(node.target) not in ATEN_OPS:
            yield f"{node.name} calls {op_name(node.target)}, which is not in the list of ops a program may hold"
    yield from _state_violations(program)


def _placeholder_violations(program: Program) -> Iterator[str]:
    found = [node.name for node in program.graph.find_nodes(op="placeholder")]
    expected = program.placeholder_names()
    if found != expected:
        yield f"its placeholders are not those of its tables in their order, see {sorted(set(found) ^ set(expected))}"


def _state_violations(program: Program) -> Iterator[str]:
    """A state has one writer, and nobody reads it before: an engine hands an aliased input to one consumer only."""
    placeholders = program.placeholders()
    states = {placeholders[spec.name] for spec in program.states}
    for state in states:
        users = sorted(state.users)
        writers = [node for node in users if state in _mutated_operands(node)]
        if len(writers) != 1:
            yield f"state {state.name} is written by {[node.name for node in writers]}, expected exactly one op"
        elif users[0] is not writers[0]:
            yield f"{users[0].name} reads state {state.name} before {writers[0].name} writes it"
    for node in program.calls():
        for operand in _mutated_operands(node):
            if operand not in states:
                yield f"{node.name} mutates {operand.name}, which is not a state"


def _mutated_operands(node: Any) -> list[fx.Node]:
    spec = spec_of(node.target)
    return [] if spec is None else [v for v, arg in zip(node.args, spec.inputs, strict=False) if arg.mutated]
