"""Sample operands."""

from __future__ import annotations

from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import sample_fp8
from qwen4exp_trt.plugins.sample_experts import moe_cases, sample_shared_expert

H, I, IS = 136, 130, 24  # noqa: E741


def _sample_projections(dtype: torch.dtype, generator: torch.Generator, experts: int) -> dict[str, Any]:
    parts = [sample_fp8(generator, I, H) for _ in range(2 * experts)]
    gate_up, gate_up_scales = (torch.stack(operand) for operand in zip(*parts, strict=True))
    parts = [sample_fp8(generator, H, I) for _ in range(experts)]
    down, down_scales = (torch.stack(operand) for operand in zip(*parts, strict=True))
    return {
        "gate_up_proj": gate_up.view(experts, 2 * I, H),
        "gate_up_scales": gate_up_scales.unflatten(0, (experts, 2)),
        "down_proj": down,
        "down_scales": down_scales,
        **sample_shared_expert(dtype, generator, H, IS),
    }


CASES = moe_cases(H, _sample_projections)
