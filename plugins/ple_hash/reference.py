"""Slow oracle in Python integers."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    input_ids: Tensor,
    ngram_ids: Tensor,
    multipliers: Tensor,
    head_sizes: Tensor,
    head_offsets: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_ids: Tensor,
    num_seqs: Tensor,
    eos_token_id: int,
) -> Tensor:
    m, sizes, offsets = multipliers.tolist(), head_sizes.tolist(), head_offsets.tolist()
    per_ngram = len(sizes) // (len(m) - 1)
    rows = torch.zeros(len(input_ids), len(sizes), dtype=torch.int64)
    for b in range(int(num_seqs)):
        start, end = int(query_start_loc[b]), int(query_start_loc[b + 1])
        slot = int(slot_ids[b])
        for t in range(start, end):
            p = int(seq_lens[b]) - (end - t)
            ngram_ids[slot, p % ngram_ids.shape[1]] = input_ids[t]
            context, ended = [int(input_ids[t])], False
            for age in range(1, len(m)):
                token = int(ngram_ids[slot, (p - age) % ngram_ids.shape[1]])
                ended = ended or age > p or token == eos_token_id
                context.append(eos_token_id if ended else token)
            for head in range(len(sizes)):
                mixed = 0
                for age in range(head // per_ngram + 2):
                    mixed ^= context[age] * m[age]
                rows[t, head] = mixed % sizes[head] + offsets[head]
    return rows
