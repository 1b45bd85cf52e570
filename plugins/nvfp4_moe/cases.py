"""Sample operands."""

from __future__ import annotations

from typing import Any

import torch

from qwen4exp_trt.plugins.nvfp4_routed_moe.cases import sample_routed
from qwen4exp_trt.plugins.sample_batches import sample_nvfp4
from qwen4exp_trt.plugins.spec import Case


def _case(tokens: int, experts: int, top_k: int, norm_topk_prob: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        H, IS = 48, 16
        gate_up = sample_nvfp4(generator, 2 * IS, H, global_scales=2)
        down = sample_nvfp4(generator, H, IS)
        parts = ("proj", "block_scales", "scales")
        return {
            **sample_routed(dtype, generator, tokens, experts, H),
            **{f"shared_gate_up_{part}": operand for part, operand in zip(parts, gate_up, strict=True)},
            **{f"shared_down_{part}": operand for part, operand in zip(parts, down, strict=True)},
            "num_experts_per_tok": top_k,
            "norm_topk_prob": norm_topk_prob,
        }

    return Case(f"T{tokens}-E{experts}-K{top_k}-norm{norm_topk_prob}", make)


CASES = (_case(1, 16, 4, 1), _case(19, 8, 3, 0), _case(4, 4, 4, 1))
