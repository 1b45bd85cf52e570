"""Slow float32 oracle: one head of one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def step(S: Tensor, k: Tensor, v: Tensor, b: Tensor, a: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """The state ``[K, V]`` of one head after one token."""
    k = k / torch.sqrt((k * k).sum() + 1e-6)
    beta = 1 / (1 + torch.exp(-b))
    S = torch.exp(-torch.exp(A_log) * torch.log1p(torch.exp(a + dt_bias))) * S
    return S + torch.outer(k, beta * (v - S.T @ k))


def steps(states: Tensor, row: Tensor, A_log: Tensor, dt_bias: Tensor, num_k_heads: int) -> Tensor:
    """The states ``[HV, K, V]`` of all heads after a token whose row is ``k | v | b | a``."""
    HV, K, V = states.shape
    after = torch.empty_like(states)
    for h in range(HV):
        k_head = h // (HV // num_k_heads)
        k = row[k_head * K : (k_head + 1) * K]
        v = row[num_k_heads * K + h * V : num_k_heads * K + (h + 1) * V]
        b, a = row[h - 2 * HV], row[h - HV]
        after[h] = step(states[h], k, v, b, a, A_log[h], dt_bias[h])
    return after


def reference(
    conv_out: Tensor,
    qkvz: Tensor,
    ba: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    recurrent_state: Tensor,
    draft_rows: Tensor,
    committed_len: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_ids: Tensor,
    num_seqs: Tensor,
    num_k_heads: int,
    eps: float,
    output_gate: str,
) -> Tensor:
    _, HV, K, V = recurrent_state.shape
    conv_dim, key_width, ring = conv_out.shape[1], num_k_heads * K, draft_rows.shape[1]
    out = torch.zeros(conv_out.shape[0], HV * V)
    for seq in range(int(num_seqs)):
        start, end, slot = int(query_start_loc[seq]), int(query_start_loc[seq + 1]), int(slot_ids[seq])
        context = int(seq_lens[seq]) - (end - start)
        lens = committed_len[slot].tolist() if context else [0, 0]
        held = max(length for length in lens if length <= context)
        states = recurrent_state[slot].clone() if context else torch.zeros(HV, K, V)
        for p in range(held, context):
            states = steps(states, draft_rows[slot, p % ring], A_log, dt_bias, num_k_heads)
        last = end - 1 if end - start > ring // 2 else start
        for t in range(start, end):
            row = torch.cat([conv_out[t, key_width:], ba[t]])
            states = steps(states, row, A_log, dt_bias, num_k_heads)
            if t == last:
                recurrent_state[slot] = states
            elif t > last:
                draft_rows[slot, (context + t - start) % ring] = row
            for h in range(HV):
                qk_head = h // (HV // num_k_heads)
                q = conv_out[t, qk_head * K : (qk_head + 1) * K]
                o = states[h].T @ (q / torch.sqrt((q * q).sum() + 1e-6) / K**0.5)
                z = qkvz[t, conv_dim + h * V : conv_dim + (h + 1) * V]
                gate = 1 / (1 + torch.exp(-z)) * (z if output_gate == "silu" else 1)
                out[t, h * V : (h + 1) * V] = o / torch.sqrt((o * o).mean() + eps) * norm_weight * gate
        new = context + last + 1 - start
        committed_len[slot] = torch.tensor([lens[0], new] if context and lens[0] == held else [new, lens[1]])
    return out
