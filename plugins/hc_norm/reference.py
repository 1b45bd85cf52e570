"""Slow float32 oracle, one stream of one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(stack: Tensor, gain: Tensor, hc_count: int, eps: float) -> Tensor:
    out = torch.empty_like(stack)
    width = stack.shape[1] // hc_count
    for t in range(stack.shape[0]):
        for c in range(hc_count):
            part = slice(c * width, (c + 1) * width)
            x = stack[t, part]
            out[t, part] = x / torch.sqrt((x * x).sum() / width + eps) * gain[part]
    return out
