"""Slow float32 oracle: one output element at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def reference(normed: Tensor, weight: Tensor, hc_count: int) -> tuple[Tensor, Tensor]:
    tokens, rank = normed.shape[0], weight.shape[0] - hc_count
    lowrank, inject = torch.empty(tokens, rank), torch.empty(tokens, hc_count)
    for t in range(tokens):
        for n in range(weight.shape[0]):
            logit = (normed[t] * weight[n]).sum() / hc_count
            gate = 1 / (1 + torch.exp(-logit))
            if n < rank:
                lowrank[t, n] = logit * gate
            else:
                inject[t, n - rank] = 2 * gate
    return lowrank, inject
