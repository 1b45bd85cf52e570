"""Sample operands."""

from __future__ import annotations

from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import normal
from qwen4exp_trt.plugins.spec import Case


def _case(tokens: int, rows: int, columns: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        x = normal(generator, tokens, columns, dtype=dtype)
        return {"x": x, "weight": normal(generator, rows, columns, dtype=dtype)}

    return Case(f"T{tokens}-N{rows}-K{columns}", make)


CASES = (_case(1, 48, 64), _case(7, 37, 160), _case(3, 20, 13))
