"""Merges projections of the same input whose outputs are concatenated.

    cat([linear(x, w0), linear(x, w1), ...], -1)  ->  linear(x, cat([w0, w1, ...]))

One product reads ``x`` once, and the concatenation disappears. A product that another op reads too is left alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from qwen4exp_trt.passes.base import graph_pass
from qwen4exp_trt.passes.patterns import ATEN, erase_unused, insert_call, match_linear_concat
from qwen4exp_trt.runtime.program import Program


@graph_pass(ensures=["projections_merged"], tolerance=1e-5)
def merge_projections(program: Program) -> int:
    rewrites = 0
    for concat in list(program.graph.find_nodes(op="call_function", target=ATEN.cat.default)):
        match = match_linear_concat(concat)
        if match is not None:
            _merge(program.graph, concat, *match)
            rewrites += 1
    return rewrites


def _merge(graph: fx.Graph, concat: fx.Node, x: fx.Node, weights: Sequence[fx.Node]) -> None:
    module, separator, _ = concat.name.rpartition("__")
    name = module + separator + "_".join(_projection_name(weight) for weight in weights)
    weight = insert_call(graph, concat, f"{name}__cat", ATEN.cat.default, (list(weights),))
    merged = insert_call(graph, concat, name, ATEN.linear.default, (x, weight))
    concat.replace_all_uses_with(merged)
    erase_unused(graph, concat)


def _projection_name(weight: fx.Node) -> str:
    """The module that owns the weight: ``q_proj`` of ``layers__3__self_attn__q_proj__weight``."""
    return weight.name.removesuffix("__weight").rpartition("__")[-1]
