"""Sample operands."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from qwen4exp_trt.plugins.sample_batches import sample_nvfp4
from qwen4exp_trt.plugins.sample_experts import moe_cases, sample_shared_expert

H, I, IS = 48, 32, 24  # noqa: E741


def _sample_experts(generator: Generator, experts: int, rows: int, columns: int, global_scales: int) -> list[Tensor]:
    """`sample_nvfp4` of each expert, stacked."""
    parts = [sample_nvfp4(generator, rows, columns, global_scales=global_scales) for _ in range(experts)]
    return [torch.stack(operand) for operand in zip(*parts, strict=True)]


def sample_routed(generator: Generator, experts: int) -> dict[str, Any]:
    """The projections of the routed experts."""
    gate_up = _sample_experts(generator, experts, 2 * I, H, global_scales=2)
    down = _sample_experts(generator, experts, H, I, global_scales=1)
    return {
        **dict(zip(("gate_up_proj", "gate_up_block_scales", "gate_up_scales"), gate_up, strict=True)),
        "down_proj": down[0],
        "down_block_scales": down[1],
        "down_scales": down[2].flatten(),
    }


def _sample_projections(dtype: torch.dtype, generator: Generator, experts: int) -> dict[str, Any]:
    return {**sample_routed(generator, experts), **sample_shared_expert(dtype, generator, H, IS)}


CASES = moe_cases(H, _sample_projections)
