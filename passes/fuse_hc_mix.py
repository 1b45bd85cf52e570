"""Fuses the up projection of a hyper-connection read with the gated mean behind it.

    hc_mix(linear(lowrank, up_weight), normed, HC)  ->  hc_gate_mix(lowrank, up_weight, normed, HC)

The gate logits, as wide as the stack, are then never in memory.
"""

from __future__ import annotations

from torch import fx

from qwen4exp_trt.passes.base import graph_pass
from qwen4exp_trt.passes.patterns import (
    GatedMix,
    erase_unused,
    insert_call,
    match_gated_mix,
    q4e_op,
    sibling_name,
)
from qwen4exp_trt.runtime.program import Program


@graph_pass(ensures=["hc_mixes_fused"])
def fuse_hc_mix(program: Program) -> int:
    rewrites = 0
    for mix in list(program.graph.find_nodes(op="call_function", target=q4e_op("hc_mix"))):
        match = match_gated_mix(mix)
        if match is not None:
            _fuse(program.graph, match, mix)
            rewrites += 1
    return rewrites


def _fuse(graph: fx.Graph, match: GatedMix, mix: fx.Node) -> None:
    name = sibling_name(mix, "hc_mix", "hc_gate_mix")
    operands = (match.lowrank, match.up_weight, match.normed, match.hc_count)
    fused = insert_call(graph, mix, name, q4e_op("hc_gate_mix"), operands)
    mix.replace_all_uses_with(fused)
    erase_unused(graph, mix)
