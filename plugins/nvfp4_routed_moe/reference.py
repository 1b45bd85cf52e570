"""Slow float32 oracle: the one of ``moe`` over routed experts that are decoded code by code."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.moe.reference import reference as moe_reference
from qwen4exp_trt.plugins.nvfp4_moe.reference import decode_down, decode_gate_up


def reference(
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
    gate_up = map(decode_gate_up, gate_up_proj, gate_up_block_scales, gate_up_scales)
    down = map(decode_down, down_proj, down_block_scales, down_scales)
    return moe_reference(
        x,
        router_weight,
        torch.stack(list(gate_up)),
        torch.stack(list(down)),
        shared_gate_up_proj,
        shared_down_proj,
        shared_expert_gate,
        query_start_loc,
        num_seqs,
        num_experts_per_tok,
        norm_topk_prob,
    )
