"""Sample operands."""

from __future__ import annotations

from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import gain, normal
from qwen4exp_trt.plugins.spec import Case


def _case(tokens: int, hc_count: int, hidden: int, scale: float) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        width = hc_count * hidden
        stack = normal(generator, tokens, width, dtype=dtype, scale=scale)
        return {"stack": stack, "gain": gain(generator, width), "hc_count": hc_count, "eps": 1e-6}

    return Case(f"T{tokens}-HC{hc_count}-H{hidden}-scale{scale}", make)


CASES = (_case(1, 4, 64, 1.0), _case(5, 2, 48, 30.0), _case(3, 4, 96, 1e-3), _case(2, 1, 10240, 1.0))
