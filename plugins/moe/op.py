"""Mixture of experts with 16-bit weights: router, top-k experts, shared expert and their combine."""

from __future__ import annotations

from torch import Tensor

from qwen4exp_trt.plugins.experts import float_shared_expert, gated_mlp, mix_experts, moe_spec
from qwen4exp_trt.plugins.moe.cases import CASES
from qwen4exp_trt.plugins.moe.reference import reference
from qwen4exp_trt.plugins.spec import TensorArg


def body(
    x: Tensor,
    router_weight: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    shared_gate_up_proj: Tensor,
    shared_down_proj: Tensor,
    shared_expert_gate: Tensor,
    query_start_loc: Tensor,
    num_seqs: Tensor,
    num_experts_per_tok: int,
    norm_topk_prob: int,
) -> Tensor:
    return mix_experts(
        x,
        router_weight,
        shared_expert_gate,
        query_start_loc,
        num_seqs,
        num_experts_per_tok,
        bool(norm_topk_prob),
        lambda expert, rows: gated_mlp(rows, gate_up_proj[expert], down_proj[expert]),
        lambda rows: gated_mlp(rows, shared_gate_up_proj, shared_down_proj),
    )


SPEC = moe_spec(
    "moe",
    "H",
    (TensorArg("gate_up_proj", ("E", "2*I", "H")), TensorArg("down_proj", ("E", "H", "I"))),
    float_shared_expert("H"),
    body,
    reference,
    CASES,
)
