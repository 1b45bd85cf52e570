"""Slow float32 oracle: one code and one block scale at a time, decoded from their bits."""

from __future__ import annotations

import torch
from torch import Tensor


def e2m1(code: int) -> float:
    exponent, mantissa = (code >> 1) & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (2 + mantissa) * 2.0 ** (exponent - 2)
    return -magnitude if code & 8 else magnitude


def e4m3(byte: int) -> float:
    exponent, mantissa = (byte >> 3) & 15, byte & 7
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if byte & 128 else magnitude


def decode_nvfp4(packed: Tensor, block_scales: Tensor, row_scales: Tensor) -> Tensor:
    """``[N, K/2]`` bytes, ``[N, K/16]`` scale bytes and ``[N]`` float32 -> float32 ``[N, K]``."""
    pairs, scales = packed.view(torch.uint8).tolist(), block_scales.view(torch.uint8).tolist()
    rows = [
        [
            e2m1(pairs[n][k // 2] >> 4 if k % 2 else pairs[n][k // 2] & 15) * e4m3(scales[n][k // 16]) * row_scale
            for k in range(2 * len(pairs[n]))
        ]
        for n, row_scale in enumerate(row_scales.tolist())
    ]
    return torch.tensor(rows)


def reference(x: Tensor, weight: Tensor, block_scales: Tensor, row_scales: Tensor) -> Tensor:
    rows = decode_nvfp4(weight, block_scales, row_scales)
    return torch.stack([torch.stack([(token * row).sum() for row in rows]) for token in x])
