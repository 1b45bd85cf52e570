"""Slow float32 oracle: the one of ``moe`` over routed experts that are decoded byte by byte."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.fp8_linear.reference import decode_fp8
from qwen4exp_trt.plugins.moe.reference import reference as moe_reference


def _decode_gate_up(weight: Tensor, scales: Tensor) -> Tensor:
    """Gate rows, then up rows, each half under its own grid."""
    return torch.cat([decode_fp8(part, grid) for part, grid in zip(weight.chunk(2), scales, strict=True)])


def reference(
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
    return moe_reference(
        x,
        router_weight,
        torch.stack(list(map(_decode_gate_up, gate_up_proj, gate_up_scales))),
        torch.stack(list(map(decode_fp8, down_proj, down_scales))),
        shared_gate_up_proj,
        shared_down_proj,
        shared_expert_gate,
        query_start_loc,
        num_seqs,
        num_experts_per_tok,
        norm_topk_prob,
    )
