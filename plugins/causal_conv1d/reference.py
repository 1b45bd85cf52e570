"""Slow float32 oracle: token by token, each into the ring once it is convolved."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_ids: Tensor,
    num_seqs: Tensor,
) -> Tensor:
    (channels, taps), ring = weight.shape, conv_state.shape[1]
    out = torch.zeros(x.shape[0], channels)
    for b in range(int(num_seqs)):
        start, end, slot = int(query_start_loc[b]), int(query_start_loc[b + 1]), int(slot_ids[b])
        for t in range(start, end):
            p = int(seq_lens[b]) - (end - t)
            value = weight[:, -1] * x[t, :channels]
            for back in range(1, min(taps, p + 1)):
                value += weight[:, taps - 1 - back] * conv_state[slot, (p - back) % ring]
            out[t] = value / (1 + torch.exp(-value))
            conv_state[slot, p % ring] = x[t, :channels]
    return out
