"""Fuses the three ops of a hyper-connection read into one.

    combined, normed = hc_combine_norm(stack, y, inject, gain, eps)      combined, mixed, next_inject = hc_read(
    lowrank, next_inject = hc_project(normed, weight, HC)            ->      stack, y, inject, gain,
    mixed = hc_gate_mix(lowrank, up_weight, normed, HC)                      weight, up_weight, eps)

A decode step is a chain of short kernels: the op needs two, and the normed stack stays inside it. A read without a
pending combine (of the first layer, of the n-gram embedding's sum) or without inject weights (the final mixer's) stays.
"""

from __future__ import annotations

import operator

from torch import fx

from qwen4exp_trt.passes.base import graph_pass
from qwen4exp_trt.passes.patterns import HcRead, erase_unused, insert_call, match_hc_read, q4e_op, sibling_name
from qwen4exp_trt.runtime.program import Program


@graph_pass(ensures=["hc_reads_fused"])
def fuse_hc_reads(program: Program) -> int:
    rewrites = 0
    for mix in list(program.graph.find_nodes(op="call_function", target=q4e_op("hc_gate_mix"))):
        match = match_hc_read(mix)
        if match is not None:
            _fuse(program.graph, match)
            rewrites += 1
    return rewrites


def _fuse(graph: fx.Graph, match: HcRead) -> None:
    mix, name = match.mix, sibling_name(match.combine_norm, "hc_combine_norm", "hc_read")
    *operands, eps = match.combine_norm.args
    weights = (match.project.args[1], mix.args[1])
    read = insert_call(graph, mix, name, q4e_op("hc_read"), (*operands, *weights, eps))
    results = [
        insert_call(graph, mix, f"{name}__{result}", operator.getitem, (read, index))
        for index, result in enumerate(("combined", "mixed", "inject"))
    ]
    mix.replace_all_uses_with(results[1])
    for call, index, result in ((match.combine_norm, 0, results[0]), (match.project, 1, results[2])):
        for taken in [user for user in call.users if user.args[1] == index]:
            taken.replace_all_uses_with(result)
            graph.erase_node(taken)
    erase_unused(graph, mix)
