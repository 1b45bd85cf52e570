"""Slow float32 oracle: token by token, shifting the state."""

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
    channels = weight.shape[0]
    out = torch.zeros(x.shape[0], channels)
    for b in range(int(num_seqs)):
        start, end = int(query_start_loc[b]), int(query_start_loc[b + 1])
        window = conv_state[int(slot_ids[b])].clone()
        if int(seq_lens[b]) == end - start:
            window.zero_()
        for t in range(start, end):
            taps = torch.cat([window, x[t : t + 1, :channels]])
            value = (taps * weight.T).sum(0)
            out[t] = value / (1 + torch.exp(-value))
            window = taps[1:]
        conv_state[int(slot_ids[b])] = window
    return out
