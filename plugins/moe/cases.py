"""Sample operands."""

from __future__ import annotations

from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import normal
from qwen4exp_trt.plugins.spec import Case


def _case(tokens: int, experts: int, top_k: int, norm_topk_prob: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        H, I, IS = 48, 32, 16  # noqa: E741

        def weight(*shape: int) -> torch.Tensor:
            return normal(generator, *shape, dtype=dtype, scale=shape[-1] ** -0.5)

        return {
            "x": normal(generator, tokens, H, dtype=dtype),
            "router_weight": weight(experts, H),
            "gate_up_proj": weight(experts, 2 * I, H),
            "down_proj": weight(experts, H, I),
            "shared_gate_up_proj": weight(2 * IS, H),
            "shared_down_proj": weight(H, IS),
            "shared_expert_gate": weight(1, H),
            "num_experts_per_tok": top_k,
            "norm_topk_prob": norm_topk_prob,
        }

    return Case(f"T{tokens}-E{experts}-K{top_k}-norm{norm_topk_prob}", make)


CASES = (_case(1, 16, 4, 1), _case(19, 8, 3, 0), _case(4, 4, 4, 1))
