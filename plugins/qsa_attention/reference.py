"""Slow float32 oracle: one head of one query at a time over an explicit list of keys."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen4exp_trt.plugins.qsa_indexer.reference import norm_and_rotate


def visible_keys(position: int, selected: Sequence[int], compress_ratio: int) -> list[int]:
    """The key positions that a query at ``position`` reads."""
    if compress_ratio == 0:
        return list(range(position + 1))
    groups = [group for group in selected if group >= 0]
    keys = [group * compress_ratio + i for group in groups for i in range(compress_ratio)]
    return keys + list(range((position + 1) // compress_ratio * compress_ratio, position + 1))


def to_cache(x: Tensor, dtype: torch.dtype) -> Tensor:
    """FP8: the nearest of its numbers, of two equally near ones the one of even byte; beyond them the largest."""
    if dtype != torch.float8_e4m3fn:
        return x
    bytes_by_parity = torch.tensor([*range(0, 0x7F, 2), *range(1, 0x7F, 2)], dtype=torch.uint8)
    distance = (x.abs()[..., None] - bytes_by_parity.view(dtype).float()).abs()
    return bytes_by_parity[distance.argmin(-1)].view(dtype).float().copysign(x).to(dtype)


def reference(
    qkv: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    selected_groups: Tensor,
    kv_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_seqs: Tensor,
    num_heads: int,
    mrope_section: Sequence[int],
    compress_ratio: int,
    eps: float,
) -> Tensor:
    _, _, P, HKV, D = kv_cache.shape
    out = torch.zeros(qkv.shape[0], num_heads * D)
    rope = (inv_freq, mrope_section, eps)
    for b in range(int(num_seqs)):
        start, end = int(query_start_loc[b]), int(query_start_loc[b + 1])
        for t in range(start, end):
            p = int(seq_lens[b]) - (end - t)
            place = (int(block_table[b, p // P]), p % P)
            k, v = qkv[t, 2 * num_heads * D :].reshape(2, HKV, D)
            for h in range(HKV):
                k_h = norm_and_rotate(k[h], k_gain, positions[:, t], *rope)
                kv_cache[place[0], 0, place[1], h] = to_cache(k_h, kv_cache.dtype)
                kv_cache[place[0], 1, place[1], h] = to_cache(v[h], kv_cache.dtype)
            selected = [] if compress_ratio == 0 else selected_groups[t].tolist()
            keys = visible_keys(p, selected, compress_ratio)
            pages = [kv_cache[int(block_table[b, key // P]), :, key % P] for key in keys]
            for h in range(num_heads):
                q, gate = qkv[t, 2 * h * D : 2 * (h + 1) * D].reshape(2, D)
                q = norm_and_rotate(q, q_gain, positions[:, t], *rope)
                kv = torch.stack([page[:, h // (num_heads // HKV)].float() for page in pages])
                weights = torch.softmax(kv[:, 0] @ q / D**0.5, 0)
                out[t, h * D : (h + 1) * D] = weights @ kv[:, 1] / (1 + torch.exp(-gate))
    return out
