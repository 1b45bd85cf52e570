"""Slow float32 oracle: one row at a time, decoded code by code."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.nvfp4_linear.reference import decode_nvfp4


def reference(rows: Tensor, table: Tensor, block_scales: Tensor, scales: Tensor, dtype: str) -> Tensor:
    packed, tokens = table.view(torch.uint8), []
    for token in rows.tolist():
        decoded = [
            decode_nvfp4(packed[row, None], block_scales[row, None], scales[row * len(scales) // len(table), None])
            for row in token
        ]
        tokens.append(torch.cat(decoded, 1)[0])
    return torch.stack(tokens)
