"""Slow float32 oracle: one head of one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    conv_out: Tensor,
    qkvz: Tensor,
    ba: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    recurrent_state: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_ids: Tensor,
    num_seqs: Tensor,
    num_k_heads: int,
    eps: float,
    output_gate: str,
) -> Tensor:
    _, HV, K, V = recurrent_state.shape
    conv_dim, key_width = conv_out.shape[1], num_k_heads * K
    out = torch.zeros(conv_out.shape[0], HV * V)
    for seq in range(int(num_seqs)):
        start, end = int(query_start_loc[seq]), int(query_start_loc[seq + 1])
        states = recurrent_state[int(slot_ids[seq])]
        if int(seq_lens[seq]) == end - start:
            states.zero_()
        for t in range(start, end):
            for h in range(HV):
                qk_head = h // (HV // num_k_heads)
                q = conv_out[t, qk_head * K : (qk_head + 1) * K]
                k = conv_out[t, key_width + qk_head * K : key_width + (qk_head + 1) * K]
                v = conv_out[t, 2 * key_width + h * V : 2 * key_width + (h + 1) * V]
                q = q / torch.sqrt((q * q).sum() + 1e-6) / K**0.5
                k = k / torch.sqrt((k * k).sum() + 1e-6)
                beta = 1 / (1 + torch.exp(-ba[t, h]))
                decay = torch.exp(-torch.exp(A_log[h]) * torch.log1p(torch.exp(ba[t, HV + h] + dt_bias[h])))
                S = decay * states[h]
                S = S + torch.outer(k, beta * (v - S.T @ k))
                states[h] = S
                o = S.T @ q
                z = qkvz[t, conv_dim + h * V : conv_dim + (h + 1) * V]
                gate = 1 / (1 + torch.exp(-z)) * (z if output_gate == "silu" else 1)
                out[t, h * V : (h + 1) * V] = o / torch.sqrt((o * o).mean() + eps) * norm_weight * gate
    return out
