"""Slow float32 oracle: one expert of one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def _mlp(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = gate @ x
    return down @ (hidden / (1 + torch.exp(-hidden)) * (up @ x))


def reference(
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
    out = torch.zeros_like(x)
    inner, shared_inner = down_proj.shape[2], shared_down_proj.shape[1]
    for t in range(int(query_start_loc[int(num_seqs)])):
        probabilities = torch.softmax(router_weight @ x[t], 0).tolist()
        chosen = sorted(range(len(probabilities)), key=lambda e: (-probabilities[e], e))[:num_experts_per_tok]
        total = sum(probabilities[e] for e in chosen) if norm_topk_prob else 1.0
        for e in chosen:
            gate, up = gate_up_proj[e, :inner], gate_up_proj[e, inner:]
            out[t] += probabilities[e] / total * _mlp(x[t], gate, up, down_proj[e])
        shared_gate = 1 / (1 + torch.exp(-(shared_expert_gate[0] @ x[t])))
        gate, up = shared_gate_up_proj[:shared_inner], shared_gate_up_proj[shared_inner:]
        out[t] += shared_gate * _mlp(x[t], gate, up, shared_down_proj)
    return out
