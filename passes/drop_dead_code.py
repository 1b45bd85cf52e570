"""Drops ops whose results nothing reads and that change no state, and weights that no op reads."""

from __future__ import annotations

from qwen4exp_trt.passes.base import graph_pass
from qwen4exp_trt.passes.patterns import is_dead
from qwen4exp_trt.runtime.program import Program


@graph_pass(ensures=["no_dead_code"])
def drop_dead_code(program: Program) -> int:
    dropped = 0
    for node in reversed(list(program.calls())):
        if is_dead(node):
            program.graph.erase_node(node)
            dropped += 1
    placeholders = program.placeholders()
    unread = [spec for spec in program.weights if not placeholders[spec.name].users]
    for spec in unread:
        program.graph.erase_node(placeholders[spec.name])
    program.weights = tuple(spec for spec in program.weights if spec not in unread)
    return dropped + len(unread)
