"""Sample operands."""

from __future__ import annotations

from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import gain, normal
from qwen4exp_trt.plugins.spec import Case


def _case(tokens: int, hc_count: int, hidden: int, rank: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        width = hc_count * hidden
        return {
            "stack": normal(generator, tokens, width, dtype=dtype, scale=3.0),
            "y": normal(generator, tokens, hidden, dtype=dtype),
            "inject": (2 * torch.rand(tokens, hc_count, generator=generator)).to(dtype),
            "gain": gain(generator, width),
            "weight": normal(generator, rank + hc_count, width, dtype=dtype, scale=2 * width**-0.5),
            "up_weight": normal(generator, width, rank, dtype=dtype, scale=3 * rank**-0.5),
            "eps": 1e-6,
        }

    return Case(f"T{tokens}-HC{hc_count}-H{hidden}-LR{rank}", make)


CASES = (_case(1, 4, 64, 32), _case(3, 4, 96, 32), _case(9, 2, 32, 64), _case(2, 3, 40, 20))
