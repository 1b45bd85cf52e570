"""Slow float32 oracle: the one of ``moe`` over weights that are decoded code by code."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.moe.reference import reference as moe_reference
from qwen4exp_trt.plugins.nvfp4_linear.reference import decode_nvfp4


def decode_gate_up(packed: Tensor, block_scales: Tensor, scales: Tensor) -> Tensor:
    """Gate rows, then up rows, each half under its own global scale."""
    inner = packed.shape[0] // 2
    return decode_nvfp4(packed, block_scales, torch.cat([scales[0].expand(inner), scales[1].expand(inner)]))


def decode_down(packed: Tensor, block_scales: Tensor, scale: Tensor) -> Tensor:
    return decode_nvfp4(packed, block_scales, scale.expand(packed.shape[0]))


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
    gate_up = map(decode_gate_up, gate_up_proj, gate_up_block_scales, gate_up_scales)
    down = map(decode_down, down_proj, down_block_scales, down_scales)
    return moe_reference(
        x,
        router_weight,
        torch.stack(list(gate_up)),
        torch.stack(list(down)),
        decode_gate_up(shared_gate_up_proj, shared_gate_up_block_scales, shared_gate_up_scales),
        decode_down(shared_down_proj, shared_down_block_scales, shared_down_scales),
        shared_expert_gate,
        query_start_loc,
        num_seqs,
        num_experts_per_tok,
        norm_topk_prob,
    )
