"""Sample operands."""

from __future__ import annotations

from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import normal
from qwen4exp_trt.plugins.spec import Case


def _case(tokens: int, heads: int, width: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        rows = torch.randint(1000, (tokens, heads), generator=generator)
        return {"rows": rows, "table": normal(generator, 1000, width, dtype=dtype)}

    return Case(f"T{tokens}-P{heads}-E{width}", make)


CASES = (_case(1, 16, 20), _case(33, 8, 16))
