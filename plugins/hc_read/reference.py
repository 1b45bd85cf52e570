"""Slow float32 oracle: the oracles of the parts."""

from __future__ import annotations

from torch import Tensor

from qwen4exp_trt.plugins.hc_combine_norm.reference import reference as combine_norm_reference
from qwen4exp_trt.plugins.hc_gate_mix.reference import reference as gate_mix_reference
from qwen4exp_trt.plugins.hc_project.reference import reference as project_reference


def reference(
    stack: Tensor, y: Tensor, inject: Tensor, gain: Tensor, weight: Tensor, up_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    hc_count = inject.shape[1]
    combined, normed = combine_norm_reference(stack, y, inject, gain, eps)
    lowrank, next_inject = project_reference(normed, weight, hc_count)
    return combined, gate_mix_reference(lowrank, up_weight, normed, hc_count), next_inject
