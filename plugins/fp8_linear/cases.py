"""Sample operands."""

from __future__ import annotations

from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import normal, sample_fp8
from qwen4exp_trt.plugins.spec import Case


def _case(tokens: int, rows: int, columns: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        weight, scales = sample_fp8(generator, rows, columns)
        return {"x": normal(generator, tokens, columns, dtype=dtype), "weight": weight, "scales": scales}

    return Case(f"T{tokens}-N{rows}-K{columns}", make)


def _make_every_byte(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    """Every byte but NaN, in random order."""
    finite = torch.tensor([byte for byte in range(256) if byte & 0x7F != 0x7F], dtype=torch.uint8)
    order = torch.randperm(254 * 8, generator=generator) % 254
    return {
        "x": normal(generator, 3, 254, dtype=dtype),
        "weight": finite[order].view(torch.float8_e4m3fn).view(8, 254),
        "scales": torch.rand(1, 2, generator=generator) * 1e-3,
    }


CASES = (_case(1, 128, 256), _case(7, 37, 161), _case(5, 258, 20), Case("every-byte", _make_every_byte))
