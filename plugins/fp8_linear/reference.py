"""Slow float32 oracle: one byte at a time, decoded from its bits, under the scale of its block."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.nvfp4_linear.reference import e4m3

_E4M3 = [e4m3(byte) for byte in range(256)]


def decode_fp8(weight: Tensor, scales: Tensor) -> Tensor:
    """``[N, K]`` bytes and ``[ceil(N/128), ceil(K/128)]`` float32 -> float32 ``[N, K]``."""
    grid = scales.tolist()
    rows = weight.view(torch.uint8).tolist()
    return torch.tensor(
        [[_E4M3[byte] * grid[n // 128][k // 128] for k, byte in enumerate(row)] for n, row in enumerate(rows)]
    )


def reference(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    rows = decode_fp8(weight, scales)
    return torch.stack([torch.stack([(token * row).sum() for row in rows]) for token in x])
