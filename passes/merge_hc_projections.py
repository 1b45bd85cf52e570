"""Merges the two projections with which a hyper-connection reads the normed stack into one thin product.

    lowrank = silu(linear(normed, down) / HC)                 lowrank, inject =
    inject  = sigmoid(linear(normed, block_inject) / HC) * 2  ->  hc_project(normed, cat([down, block_inject]), HC)

Both read the whole normed stack, the widest activation of the model. The final mixer has no inject and keeps its own.
"""

from __future__ import annotations

import operator

from torch import fx

from qwen4exp_trt.passes.base import graph_pass
from qwen4exp_trt.passes.patterns import (
    ATEN,
    HcProjections,
    erase_unused,
    find_hc_projections,
    insert_call,
    q4e_op,
    sibling_name,
)
from qwen4exp_trt.runtime.program import Program


@graph_pass(ensures=["hc_projections_merged"], tolerance=1e-5)
def merge_hc_projections(program: Program) -> int:
    found = find_hc_projections(program)
    for projections in found:
        _merge(program.graph, projections)
    return len(found)


def _merge(graph: fx.Graph, found: HcProjections) -> None:
    position, name = min(found.lowrank, found.inject), sibling_name(found.lowrank, "silu", "hc_project")
    weights = [found.down.weight, found.block_inject.weight]
    weight = insert_call(graph, position, f"{name}__cat", ATEN.cat.default, (weights,))
    operands = (found.down.x, weight, found.down.divisor)
    project = insert_call(graph, position, name, q4e_op("hc_project"), operands)
    lowrank = insert_call(graph, position, f"{name}__lowrank", operator.getitem, (project, 0))
    inject = insert_call(graph, position, f"{name}__inject", operator.getitem, (project, 1))
    for old, new in ((found.lowrank, lowrank), (found.inject, inject)):
        old.replace_all_uses_with(new)
        erase_unused(graph, old)
