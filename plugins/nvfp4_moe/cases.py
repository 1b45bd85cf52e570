"""Sample operands."""

from __future__ import annotations

from typing import Any

import torch

from qwen4exp_trt.plugins.nvfp4_routed_moe.cases import H, sample_routed
from qwen4exp_trt.plugins.sample_batches import sample_nvfp4
from qwen4exp_trt.plugins.sample_experts import moe_cases

IS = 16


def _sample_projections(dtype: torch.dtype, generator: torch.Generator, experts: int) -> dict[str, Any]:
    gate_up = sample_nvfp4(generator, 2 * IS, H, global_scales=2)
    down = sample_nvfp4(generator, H, IS)
    parts = ("proj", "block_scales", "scales")
    return {
        **sample_routed(generator, experts),
        **{f"shared_gate_up_{part}": operand for part, operand in zip(parts, gate_up, strict=True)},
        **{f"shared_down_{part}": operand for part, operand in zip(parts, down, strict=True)},
    }


CASES = moe_cases(H, _sample_projections)
