"""Merges projections of the same input whose outputs are concatenated.

    cat([linear(x, w0), linear(x, w1), ...], -1)  ->  linear(x, cat([w0, w1, ...]))

One product reads ``x`` once, and the concatenation disappears. A product that another op reads too is left alone.
Quantized projections merge with others of their op, operand by operand: scales are joined like weights, so each part
keeps its own. Projections in FP8 merge where no block of 128 rows would hold rows of two of them.
"""

from __future__ import annotations

from torch import fx

from qwen4exp_trt.passes.base import graph_pass
from qwen4exp_trt.passes.patterns import (
    ATEN,
    LinearConcat,
    erase_unused,
    insert_call,
    match_linear_concat,
)
from qwen4exp_trt.runtime.program import Program


@graph_pass(ensures=["projections_merged"], tolerance=1e-5)
def merge_projections(program: Program) -> int:
    rewrites = 0
    for concat in list(program.graph.find_nodes(op="call_function", target=ATEN.cat.default)):
        match = match_linear_concat(concat)
        if match is not None:
            _merge(program.graph, concat, match)
            rewrites += 1
    return rewrites


def _merge(graph: fx.Graph, concat: fx.Node, match: LinearConcat) -> None:
    module, separator, _ = concat.name.rpartition("__")
    name = module + separator + "_".join(_projection_name(weights[0]) for weights in match.weights)
    merged_weights = [
        insert_call(graph, concat, f"{name}__{_operand_name(parts[0])}", ATEN.cat.default, (list(parts),))
        for parts in zip(*match.weights, strict=True)
    ]
    merged = insert_call(graph, concat, name, match.op, (match.x, *merged_weights))
    concat.replace_all_uses_with(merged)
    erase_unused(graph, concat)


def _projection_name(weight: fx.Node) -> str:
    """The module that owns the weight: ``q_proj`` of ``layers__3__self_attn__q_proj__weight``."""
    return weight.name.rpartition("__")[0].rpartition("__")[-1]


def _operand_name(weight: fx.Node) -> str:
    """What of the module it is: ``cat`` for its ``weight``, else its own name, such as ``codes``."""
    name = weight.name.rpartition("__")[-1]
    return "cat" if name == "weight" else name
