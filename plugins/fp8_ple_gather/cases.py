"""Sample operands."""

from __future__ import annotations

from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import sample_fp8
from qwen4exp_trt.plugins.spec import Case


def _case(tokens: int, heads: int, width: int, groups: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        return {
            "rows": torch.randint(960, (tokens, heads), generator=generator),
            "table": sample_fp8(generator, 960, width)[0],
            "scales": torch.rand(groups, generator=generator) + 0.1,
            "dtype": str(dtype).removeprefix("torch."),
        }

    return Case(f"T{tokens}-P{heads}-E{width}-S{groups}", make)


CASES = (_case(1, 16, 20, 1), _case(33, 8, 16, 64))
