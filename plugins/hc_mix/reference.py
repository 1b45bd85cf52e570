"""Slow float32 oracle."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(gate_logits: Tensor, normed: Tensor, hc_count: int) -> Tensor:
    hidden = normed.shape[1] // hc_count
    out = torch.zeros(normed.shape[0], hidden)
    for t in range(normed.shape[0]):
        for c in range(hc_count):
            part = slice(c * hidden, (c + 1) * hidden)
            out[t] += normed[t, part] / (1 + torch.exp(-gate_logits[t, part])) / hc_count
    return out
