"""Slow float32 oracle: one row at a time, decoded byte by byte."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.nvfp4_linear.reference import e4m3


def reference(rows: Tensor, table: Tensor, scales: Tensor, dtype: str) -> Tensor:
    tokens = []
    for token in rows.tolist():
        tokens.append([])
        for row in token:
            scale = float(scales[row * len(scales) // len(table)])
            tokens[-1] += [e4m3(byte) * scale for byte in table[row].view(torch.uint8).tolist()]
    return torch.tensor(tokens)
