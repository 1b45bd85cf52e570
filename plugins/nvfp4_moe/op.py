"""Mixture of experts with NVFP4 weights, the shared expert's too."""

from __future__ import annotations

from torch import Tensor

from qwen4exp_trt.plugins.experts import NVFP4_EXPERTS, mix_experts, moe_spec, nvfp4_gated_mlp
from qwen4exp_trt.plugins.nvfp4_moe.cases import CASES
from qwen4exp_trt.plugins.nvfp4_moe.reference import reference
from qwen4exp_trt.plugins.spec import TensorArg


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
    shared_gate_up_block_scales: Tensor,
    shared_gate_up_scales: Tensor,
    shared_down_proj: Tensor,
    shared_down_block_scales: Tensor,
    shared_down_scales: Tensor,
    shared_expert_gate: Tensor,
    query_start_loc: Tensor,
    num_seqs: Tensor,
    num_experts_per_tok: int,
    norm_topk_prob: int,
) -> Tensor:
    experts = (gate_up_proj, gate_up_block_scales, gate_up_scales, down_proj, down_block_scales, down_scales)
    shared = (
        *(shared_gate_up_proj, shared_gate_up_block_scales, shared_gate_up_scales),
        *(shared_down_proj, shared_down_block_scales, shared_down_scales),
    )
    return mix_experts(
        x,
        router_weight,
        shared_expert_gate,
        query_start_loc,
        num_seqs,
        num_experts_per_tok,
        bool(norm_topk_prob),
        lambda expert, rows: nvfp4_gated_mlp(rows, *(operand[expert] for operand in experts)),
        lambda rows: nvfp4_gated_mlp(rows, *shared),
    )


_NVFP4_SHARED_EXPERT = (
    TensorArg("shared_gate_up_proj", ("32*ISB", "16*HB"), "float4_e2m1fn_x2"),
    TensorArg("shared_gate_up_block_scales", ("32*ISB", "HB"), "float8_e4m3fn"),
    TensorArg("shared_gate_up_scales", (2,), "float32"),
    TensorArg("shared_down_proj", ("16*HB", "16*ISB"), "float4_e2m1fn_x2"),
    TensorArg("shared_down_block_scales", ("16*HB", "ISB"), "float8_e4m3fn"),
    TensorArg("shared_down_scales", (1,), "float32"),
)
SPEC = moe_spec("nvfp4_moe", "16*HB", NVFP4_EXPERTS, _NVFP4_SHARED_EXPERT, body, reference, CASES)
