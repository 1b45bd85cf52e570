"""Mixture of experts with FP8 routed experts and a 16-bit shared expert."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.experts import FP8_EXPERTS, fp8_gated_mlp, gated_mlp, mix_experts
from qwen4exp_trt.plugins.fp8_routed_moe.cases import CASES
from qwen4exp_trt.plugins.fp8_routed_moe.reference import reference
from qwen4exp_trt.plugins.packed import NUM_SEQS
from qwen4exp_trt.plugins.spec import Attr, OpSpec, TensorArg


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


SPEC = OpSpec(
    name="fp8_routed_moe",
    version=1,
    inputs=(
        TensorArg("x", ("T", "H")),
        TensorArg("router_weight", ("E", "H")),
        *FP8_EXPERTS,
        TensorArg("shared_gate_up_proj", ("2*IS", "H")),
        TensorArg("shared_down_proj", ("H", "IS")),
        TensorArg("shared_expert_gate", (1, "H")),
        TensorArg("query_start_loc", ("BP",), "int32"),
        NUM_SEQS,
    ),
    outputs=(TensorArg("out", ("T", "H")),),
    attrs=(Attr("num_experts_per_tok", "int"), Attr("norm_topk_prob", "int")),
    body=body,
    reference=reference,
    cases=CASES,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 5e-3},
)
