"""Sample operands."""

from __future__ import annotations

from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import normal, sample_nvfp4
from qwen4exp_trt.plugins.spec import Case


def _case(name: str, tokens: int, rows: int, columns: int, amax: float = 4.0, parts: int = 1) -> Case:
    """``amax``: what the input scale is calibrated for, where activations are about 1 to 4. ``parts`` as in
    ``nvfp4_linear``: projections merged along N, each with its own global scale."""

    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        weight, block_scales, scales = sample_nvfp4(generator, rows, columns, global_scales=parts)
        x = normal(generator, tokens, columns, dtype=dtype)
        x[0, :16] = 0
        input_scale = torch.tensor(amax / (6 * 448)).item()
        return {
            "x": x,
            "weight": weight,
            "block_scales": block_scales,
            "alpha": scales.repeat_interleave(rows // parts) * input_scale,
            "input_scale": input_scale,
        }

    return Case(name, make)


CASES = (
    _case("T1-N48-K64", 1, 48, 64),
    _case("T7-N37-K160", 7, 37, 160),
    _case("merged", 5, 66, 16, parts=3),
    _case("saturated", 5, 32, 64, amax=0.5),
    _case("subnormal-scales", 5, 32, 64, amax=4e4),
)
