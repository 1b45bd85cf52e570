"""Slow float32 oracle: combine stream by stream, then the norm's own oracle."""

from __future__ import annotations

from torch import Tensor

from qwen4exp_trt.plugins.hc_norm.reference import reference as norm_reference


def reference(stack: Tensor, y: Tensor, inject: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    combined = stack.clone()
    hidden = y.shape[1]
    for t in range(stack.shape[0]):
        for c in range(inject.shape[1]):
            combined[t, c * hidden : (c + 1) * hidden] += inject[t, c] * y[t]
    return combined, norm_reference(combined, gain, inject.shape[1], eps)
