"""Slow float32 oracle: one block of a token at a time, each code chosen by its distance."""

from __future__ import annotations

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E4M3 = [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)][:-1]
"""The numbers that are not negative, in order; the last one is 448."""


def _float32(value: float) -> float:
    """The result of one operation, rounded: what float64 makes of it has digits enough."""
    return torch.tensor(value, dtype=torch.float64).float().item()


def _nearest(value: float, numbers: tuple[float, ...] | list[float]) -> float:
    """Of ``numbers``, in the order of their codes; the even code where two are as near, the last one beyond it."""
    return numbers[min(range(len(numbers)), key=lambda code: (abs(numbers[code] - value), code % 2))]


def quantize_block(block: list[float], input_scale: float) -> list[float]:
    """Code * block scale of 16 activations."""
    scale = _float32(input_scale)
    amax = max(abs(value) for value in block)
    block_scale = _nearest(_float32(amax / _float32(6 * scale)), _E4M3)
    if block_scale == 0:
        return [0.0] * len(block)
    divisor = _float32(block_scale * scale)
    codes = [_nearest(_float32(abs(value) / divisor), _MAGNITUDES) for value in block]
    return [(code if value > 0 else -code) * block_scale for code, value in zip(codes, block, strict=True)]


def _decode(packed: Tensor, block_scales: Tensor) -> list[list[float]]:
    """Code * block scale of a weight: ``[N, K/2]`` bytes and ``[N, K/16]`` scale bytes."""
    pairs, scales = packed.view(torch.uint8).tolist(), block_scales.view(torch.uint8).tolist()
    nibbles = [[nibble for pair in row for nibble in (pair % 16, pair // 16)] for row in pairs]
    signs = (1, -1)
    return [
        [
            signs[nibble // 8] * _MAGNITUDES[nibble % 8] * signs[byte // 128] * _E4M3[byte % 128]
            for nibble, byte in zip(row, (byte for byte in row_scales for _ in range(16)), strict=True)
        ]
        for row, row_scales in zip(nibbles, scales, strict=True)
    ]


def reference(x: Tensor, weight: Tensor, block_scales: Tensor, alpha: Tensor, input_scale: float) -> Tensor:
    tokens = [
        [
            value
            for start in range(0, len(token), 16)
            for value in quantize_block(token[start : start + 16], input_scale)
        ]
        for token in x.tolist()
    ]
    rows = torch.tensor(_decode(weight, block_scales))
    return torch.stack([torch.stack([(token * row).sum() for row in rows]) for token in torch.tensor(tokens)]) * alpha
