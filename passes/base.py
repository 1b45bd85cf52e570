"""What a pass is, and the manager that holds each one to its word."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from qwen4exp_trt.errors import PassError
from qwen4exp_trt.passes.facts import FACTS, find_violation
from qwen4exp_trt.passes.legality import check_legality
from qwen4exp_trt.passes.verification import Verifier
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.program_text import format_program

EXACT = 0.0
"""Tolerance of a pass that changes no arithmetic: outputs and states stay bitwise the same."""


@dataclass(frozen=True)
class Pass:
    """``run`` edits a program in place and returns how many rewrites it did.

    ``requires`` and ``ensures`` name facts of `passes.facts` that hold before and after. ``tolerance`` bounds the
    error relative to the RMS of each float output and state in float32. The program after is compared with what
    ``baseline`` makes of the program before: for a pass that changes the function on purpose, the same program with
    that change spelled out. Nothing but the comparison uses it, so it may call any function.
    """

    name: str
    run: Callable[[Program], int]
    requires: frozenset[str]
    ensures: frozenset[str]
    tolerance: float
    baseline: Callable[[Program], Program] = field(default=lambda program: program, repr=False)


def graph_pass(
    *, requires: Sequence[str] = (), ensures: Sequence[str] = (), tolerance: float = EXACT
) -> Callable[[Callable[[Program], int]], Pass]:
    """Make a function ``(program) -> rewrites`` a `Pass` of the same name."""

    def wrap(run: Callable[[Program], int]) -> Pass:
        unknown = (set(requires) | set(ensures)) - FACTS
        assert not unknown, f"pass {run.__name__} names unknown facts {sorted(unknown)}"
        return Pass(run.__name__, run, frozenset(requires), frozenset(ensures), tolerance)

    return wrap


@dataclass(frozen=True)
class PassResult:
    """What one pass did."""

    name: str
    rewrites: int
    max_error: float | None
    """Largest error of the before/after execution, relative to RMS; None when it was not executed."""


class PassManager:
    """Runs passes in order and checks each: facts before and after, legality, honest counts, idempotence, numerics."""

    def __init__(self, passes: Sequence[Pass], verifier: Verifier | None = None, dump_dir: Path | None = None) -> None:
        """With a ``verifier`` the program is executed before and after each pass; ``dump_dir`` gets its text."""
        self.passes, self.verifier, self.dump_dir = tuple(passes), verifier, dump_dir

    def run(self, program: Program) -> tuple[Program, list[PassResult]]:
        """A transformed copy of ``program`` and what each pass did."""
        check_legality(program, "the program before any pass")
        program, results = program.copy(), []
        self._dump(0, "input", program)
        for index, graph_pass in enumerate(self.passes, 1):
            results.append(self._run_one(graph_pass, program))
            self._dump(index, graph_pass.name, program)
        return program, results

    def _run_one(self, graph_pass: Pass, program: Program) -> PassResult:
        check_facts(graph_pass, "requires", graph_pass.requires, program)
        before = program.copy()
        rewrites = graph_pass.run(program)
        program.module.recompile()
        check_legality(program, f"the program after pass {graph_pass.name}")
        check_facts(graph_pass, "ensures", graph_pass.ensures, program)
        changed = (format_program(before), before.tables) != (format_program(program), program.tables)
        if (rewrites > 0) != changed:
            found = "changed" if changed else "did not change"
            raise PassError(f"pass {graph_pass.name} reports {rewrites} rewrites, but the program {found}")
        again = graph_pass.run(program.copy())
        if again:
            raise PassError(f"pass {graph_pass.name} is not idempotent: a second run did {again} more rewrites")
        error = None
        if self.verifier is not None:
            error = self.verifier.compare(graph_pass.baseline(before), program, graph_pass.tolerance, graph_pass.name)
        return PassResult(graph_pass.name, rewrites, error)

    def _dump(self, index: int, name: str, program: Program) -> None:
        if self.dump_dir is not None:
            self.dump_dir.mkdir(parents=True, exist_ok=True)
            (self.dump_dir / f"{index:02d}_{name}.py").write_text(format_program(program), encoding="utf-8")


def check_facts(graph_pass: Pass, relation: str, facts: frozenset[str], program: Program) -> None:
    """Raise `PassError` for the first fact that does not hold."""
    for fact in sorted(facts):
        violation = find_violation(fact, program)
        if violation is not None:
            raise PassError(f"pass {graph_pass.name} {relation} {fact!r}, which does not hold: {violation}")
