"""Sample operands."""

from __future__ import annotations

from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import normal
from qwen4exp_trt.plugins.spec import Case


def _case(tokens: int, hc_count: int, hidden: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        width = hc_count * hidden
        return {
            "gate_logits": normal(generator, tokens, width, dtype=dtype, scale=4.0),
            "normed": normal(generator, tokens, width, dtype=dtype),
            "hc_count": hc_count,
        }

    return Case(f"T{tokens}-HC{hc_count}-H{hidden}", make)


CASES = (_case(1, 4, 64), _case(9, 2, 48))
