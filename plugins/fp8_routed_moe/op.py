"""Mixture of experts with FP8 routed experts and a 16-bit shared expert."""

from __future__ import annotations

from torch import Tensor

from qwen4exp_trt.plugins.experts import (
    FP8_EXPERTS,
    float_shared_expert,
    fp8_gated_mlp,
    gated_mlp,
    mix_experts,
    moe_spec,
)
from qwen4exp_trt.plugins.fp8_routed_moe.cases import CASES
from qwen4exp_trt.plugins.fp8_routed_moe.reference import reference


def body(
    x: Tensor,
    router_weight: Tensor,
    gate_up_proj: Tensor,
    gate_up_scales: Tensor,
    down_proj: Tensor,
    down_scales: Tensor,
    shared_gate_up_proj: Tensor,
    shared_down_proj: Tensor,
    shared_expert_gate: Tensor,
    query_start_loc: Tensor,
    num_seqs: Tensor,
    num_experts_per_tok: int,
    norm_topk_prob: int,
) -> Tensor:
    experts = (gate_up_proj, gate_up_scales, down_proj, down_scales)
    return mix_experts(
        x,
        router_weight,
        shared_expert_gate,
        query_start_loc,
        num_seqs,
        num_experts_per_tok,
        bool(norm_topk_prob),
        lambda expert, rows: fp8_gated_mlp(rows, *(operand[expert] for operand in experts)),
        lambda rows: gated_mlp(rows, shared_gate_up_proj, shared_down_proj),
    )


SPEC = moe_spec("fp8_routed_moe", "H", FP8_EXPERTS, float_shared_expert("H"), body, reference, CASES)
