"""Merges projections of the same input whose outputs are concatenated.

    cat([linear(x, w0), linear(x, w1), ...], -1)  ->  linear(x, cat([w0, w1, ...]))

One product reads ``x`` once, and the concatenation disappears.
"""

from __future__ import annotations

from qwen4exp_trt.passes.base import graph_pass
from qwen4exp_trt.passes.patterns import ATEN, erase_unused, insert_call, match_linear_concat
from qwen4exp_trt.runtime.program import Program


@graph_pass(ensures=["projections_merged"], tolerance=1e-5)
def merge_projections(program: Program) -> int:
    rewrites = 0
    for concat in list(program.graph.find_nodes(op="call_function", target=ATEN.cat.default)):
        parts = match_linear_concat(concat)
        if parts is None:
            continue
        graph, stem = program.graph, concat.name.replace("__cat", "__merged_proj")
        weight = insert_call(graph, concat, f"{stem}__cat", ATEN.cat.default, ([part.args[1] for part in parts],))
        merged = insert_call(graph, concat, stem, ATEN.linear.default, (parts[0].args[0], weight))
        concat.replace_all_uses_with(merged)
        erase_unused(graph, concat)
        rewrites += 1
    return rewrites
