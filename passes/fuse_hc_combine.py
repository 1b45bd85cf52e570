"""Fuses the pending hyper-connection combine of a block into the norm with which the next block reads the stack.

    combined = stack + view(unsqueeze(inject, 2) * unsqueeze(y, 1))      combined, normed = hc_combine_norm(
    normed   = hc_norm(combined, gain)                               ->      stack, y, inject, gain)

The stack is then read and written once per half layer. A combine that another op reads first (the n-gram embedding
adds to the stack before its layer's norm) stays as it is: that op needs the combined stack in memory.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from qwen4exp_trt.passes.base import graph_pass
from qwen4exp_trt.passes.patterns import (
    Combine,
    erase_unused,
    insert_call,
    match_pending_combine,
    q4e_op,
    sibling_name,
)
from qwen4exp_trt.runtime.program import Program


@graph_pass(ensures=["combines_fused"], tolerance=1e-6)
def fuse_hc_combine(program: Program) -> int:
    rewrites = 0
    for norm in list(program.graph.find_nodes(op="call_function", target=q4e_op("hc_norm"))):
        match = match_pending_combine(norm)
        if match is not None:
            _fuse(program.graph, match, norm)
            rewrites += 1
    return rewrites


def _fuse(graph: fx.Graph, match: Combine, norm: Any) -> None:
    combined, gain, _, eps = norm.args
    name = sibling_name(norm, "hc_norm", "hc_combine_norm")
    operands = (match.stack, match.y, match.inject, gain, eps)
    fused = insert_call(graph, norm, name, q4e_op("hc_combine_norm"), operands)
    new_stack = insert_call(graph, norm, f"{name}__combined", operator.getitem, (fused, 0))
    normed = insert_call(graph, norm, f"{name}__normed", operator.getitem, (fused, 1))
    norm.replace_all_uses_with(normed)
    graph.erase_node(norm)
    combined.replace_all_uses_with(new_stack)
    erase_unused(graph, combined)
