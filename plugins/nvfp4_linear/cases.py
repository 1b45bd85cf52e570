"""Sample operands."""

from __future__ import annotations

from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import normal, sample_nvfp4
from qwen4exp_trt.plugins.spec import Case


def _case(tokens: int, rows: int, columns: int, parts: int = 1) -> Case:
    """``parts`` projections merged along N, each with its own global scale."""

    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        weight, block_scales, scales = sample_nvfp4(generator, rows, columns, global_scales=parts)
        return {
            "x": normal(generator, tokens, columns, dtype=dtype),
            "weight": weight,
            "block_scales": block_scales,
            "row_scales": scales.repeat_interleave(rows // parts),
        }

    return Case(f"T{tokens}-N{rows}-K{columns}" + (f"-parts{parts}" if parts > 1 else ""), make)


def _make_every_byte(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
    """Codes and scales of random bits: subnormal, negative and zero scales, anything but NaN."""
    rows, blocks = 33, 16
    packed = torch.randint(0, 256, (rows, 8 * blocks), generator=generator).to(torch.uint8)
    finite = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    order = torch.randint(0, len(finite), (rows, blocks), generator=generator)
    order.view(-1)[: len(finite)] = torch.randperm(len(finite), generator=generator)
    return {
        "x": normal(generator, 3, 16 * blocks, dtype=dtype),
        "weight": packed.view(torch.float4_e2m1fn_x2),
        "block_scales": torch.tensor(finite, dtype=torch.uint8)[order].view(torch.float8_e4m3fn),
        "row_scales": torch.rand(rows, generator=generator) * 1e-3,
    }


CASES = (_case(1, 48, 64), _case(7, 37, 160), _case(5, 66, 16, 3), Case("every-byte", _make_every_byte))
