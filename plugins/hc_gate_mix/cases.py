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
            "lowrank": normal(generator, tokens, rank, dtype=dtype),
            "up_weight": normal(generator, width, rank, dtype=dtype, scale=3 * rank**-0.5),
            "normed": normal(generator, tokens, width, dtype=dtype),
            "hc_count": hc_count,
        }

    return Case(f"T{tokens}-HC{hc_count}-H{hidden}-LR{rank}", make)


CASES = (_case(1, 4, 64, 32), _case(9, 2, 48, 96), _case(3, 4, 30, 20), _case(2, 3, 32, 32))
