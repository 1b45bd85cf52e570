"""Sample operands."""

from __future__ import annotations

from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import normal
from qwen4exp_trt.plugins.spec import Case


def _case(tokens: int, hc_count: int, hidden: int, rank: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        width = hc_count * hidden
        return {
            "normed": normal(generator, tokens, width, dtype=dtype),
            "weight": normal(generator, rank + hc_count, width, dtype=dtype, scale=0.2),
            "hc_count": hc_count,
        }

    return Case(f"T{tokens}-HC{hc_count}-H{hidden}-LR{rank}", make)


CASES = (_case(1, 4, 64, 16), _case(6, 2, 48, 20))
