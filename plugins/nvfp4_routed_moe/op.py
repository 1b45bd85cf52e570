"""Mixture of experts with NVFP4 routed experts and a 16-bit shared expert."""

from __future__ import annotations

from torch import Tensor

from qwen4exp_trt.plugins.experts import (
    NVFP4_EXPERTS,
    float_shared_expert,
    gated_mlp,
    mix_experts,
    moe_spec,
    nvfp4_gated_mlp,
)
from qwen4exp_trt.plugins.nvfp4_routed_moe.cases import CASES
from qwen4exp_trt.plugins.nvfp4_routed_moe.reference import reference


def body(
    x: Tensor,
    router_weight: Tensor,
    gate_up_proj: Tensor,
    gate_up_block_scales: Tensor,
    gate_up_scales: Tensor,
    down_proj: Tensor,
    down_block_scales: Tensor,
    down_scales: Tensor,
    shared_gate_up_proj: Tensor,
    shared_down_proj: Tensor,
    shared_expert_gate: Tensor,
    query_start_loc: Tensor,
    num_seqs: Tensor,
    num_experts_per_tok: int,
    norm_topk_prob: int,
) -> Tensor:
    experts = (gate_up_proj, gate_up_block_scales, gate_up_scales, down_proj, down_block_scales, down_scales)
    return mix_experts(
        x,
        router_weight,
        shared_expert_gate,
        query_start_loc,
        num_seqs,
        num_experts_per_tok,
        bool(norm_topk_prob),
        lambda expert, rows: nvfp4_gated_mlp(rows, *(operand[expert] for operand in experts)),
        lambda rows: gated_mlp(rows, shared_gate_up_proj, shared_down_proj),
    )


SPEC = moe_spec("nvfp4_routed_moe", "16*HB", NVFP4_EXPERTS, float_shared_expert("16*HB"), body, reference, CASES)
