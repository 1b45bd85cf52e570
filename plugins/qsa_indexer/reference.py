"""Slow float32 oracle: token by token, one group at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def norm_and_rotate(
    x: Tensor, gain: Tensor, position: Tensor, inv_freq: Tensor, section: Sequence[int], eps: float
) -> Tensor:
    """RMSNorm of one head, then NeoX rotation with interleaved MRoPE at one (temporal, height, width) position."""
    x = x / torch.sqrt((x * x).mean() + eps) * gain
    out, half = x.clone(), len(inv_freq)
    for i in range(half):
        axis = i % 3 if i % 3 and i < 3 * section[i % 3] else 0
        angle = position[axis].float() * inv_freq[i]
        out[i] = x[i] * torch.cos(angle) - x[i + half] * torch.sin(angle)
        out[i + half] = x[i + half] * torch.cos(angle) + x[i] * torch.sin(angle)
    return out


def reference(
    index_qk: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    index_k_cache: Tensor,
    index_k_ring: Tensor,
    index_position_ring: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_ids: Tensor,
    block_table: Tensor,
    num_seqs: Tensor,
    mrope_section: Sequence[int],
    compress_ratio: int,
    eps: float,
) -> Tensor:
    D, per_block, ring = len(q_gain), index_k_cache.shape[1], index_k_ring.shape[1]
    index_q = torch.zeros(index_qk.shape[0], index_qk.shape[1] - D)
    for b in range(int(num_seqs)):
        start, end, slot = int(query_start_loc[b]), int(query_start_loc[b + 1]), int(slot_ids[b])
        for t in range(start, end):
            p = int(seq_lens[b]) - (end - t)
            for h in range(index_q.shape[1] // D):
                part = slice(h * D, (h + 1) * D)
                index_q[t, part] = norm_and_rotate(
                    index_qk[t, part], q_gain, positions[:, t], inv_freq, mrope_section, eps
                )
            index_k_ring[slot, p % ring] = index_qk[t, -D:]
            index_position_ring[slot, p % ring] = positions[:, t]
            if p % compress_ratio == compress_ratio - 1:
                rows = [index_k_ring[slot, (p - i) % ring] for i in range(compress_ratio)]
                first = index_position_ring[slot, (p - compress_ratio + 1) % ring]
                key = norm_and_rotate(torch.stack(rows).mean(0), k_gain, first, inv_freq, mrope_section, eps)
                group = p // compress_ratio
                index_k_cache[int(block_table[b, group // per_block]), group % per_block] = key
    return index_q
