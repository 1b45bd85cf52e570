"""Slow float32 oracle: the logits one at a time, then the mix's own oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.hc_mix.reference import reference as mix_reference


def reference(lowrank: Tensor, up_weight: Tensor, normed: Tensor, hc_count: int) -> Tensor:
    gate_logits = torch.empty_like(normed)
    for t in range(lowrank.shape[0]):
        for row in range(up_weight.shape[0]):
            gate_logits[t, row] = (lowrank[t] * up_weight[row]).sum()
    return mix_reference(gate_logits, normed, hc_count)
