"""Sample operands."""

from __future__ import annotations

from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import normal
from qwen4exp_trt.plugins.sample_experts import moe_cases, sample_shared_expert

H, I, IS = 48, 32, 16  # noqa: E741


def _sample_projections(dtype: torch.dtype, generator: torch.Generator, experts: int) -> dict[str, Any]:
    return {
        "gate_up_proj": normal(generator, experts, 2 * I, H, dtype=dtype, scale=H**-0.5),
        "down_proj": normal(generator, experts, H, I, dtype=dtype, scale=I**-0.5),
        **sample_shared_expert(dtype, generator, H, IS),
    }


CASES = moe_cases(H, _sample_projections, every_expert=True)
