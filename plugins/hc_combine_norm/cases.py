"""Sample operands."""

from __future__ import annotations

from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import gain, normal
from qwen4exp_trt.plugins.spec import Case


def _case(tokens: int, hc_count: int, hidden: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        width = hc_count * hidden
        return {
            "stack": normal(generator, tokens, width, dtype=dtype, scale=3.0),
            "y": normal(generator, tokens, hidden, dtype=dtype),
            "inject": (2 * torch.rand(tokens, hc_count, generator=generator)).to(dtype),
            "gain": gain(generator, width),
            "eps": 1e-6,
        }

    return Case(f"T{tokens}-HC{hc_count}-H{hidden}", make)


CASES = (_case(1, 4, 64), _case(7, 2, 48), _case(4, 3, 32))
