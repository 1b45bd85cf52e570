"""Slow float32 oracle: sorts (score descending, group ascending) in Python."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    index_q: Tensor,
    index_k_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_seqs: Tensor,
    budget: int,
    compress_ratio: int,
) -> Tensor:
    per_block, D = index_k_cache.shape[1:]
    selected = torch.full((index_q.shape[0], budget // compress_ratio), -1, dtype=torch.int32)
    for b in range(int(num_seqs)):
        start, end = int(query_start_loc[b]), int(query_start_loc[b + 1])
        for t in range(start, end):
            scored = []
            for group in range((int(seq_lens[b]) - (end - t) + 1) // compress_ratio):
                key = index_k_cache[int(block_table[b, group // per_block]), group % per_block]
                score = sum(max(float(head @ key), 0.0) for head in index_q[t].reshape(-1, D))
                scored.append((-score, group))
            best = sorted(group for _, group in sorted(scored)[: selected.shape[1]])
            selected[t, : len(best)] = torch.tensor(best, dtype=torch.int32)
    return selected
