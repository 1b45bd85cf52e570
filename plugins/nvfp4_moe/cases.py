"""Sample operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qwen4exp_trt.plugins.nvfp4_routed_moe.cases import sample_routed
from qwen4exp_trt.plugins.sample_batches import sample_batch, sample_nvfp4
from qwen4exp_trt.plugins.spec import Case


def _case(name: str, query_lens: Sequence[int], experts: int, top_k: int, norm: int = 1, **padding: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        H, IS = 48, 16
        gate_up = sample_nvfp4(generator, 2 * IS, H, global_scales=2)
        down = sample_nvfp4(generator, H, IS)
        parts = ("proj", "block_scales", "scales")
        return {
            **sample_routed(dtype, generator, sample_batch(query_lens, [0] * len(query_lens), **padding), experts, H),
            **{f"shared_gate_up_{part}": operand for part, operand in zip(parts, gate_up, strict=True)},
            **{f"shared_down_{part}": operand for part, operand in zip(parts, down, strict=True)},
            "num_experts_per_tok": top_k,
            "norm_topk_prob": norm,
        }

    return Case(name, make)


CASES = (
    _case("one token", [1], 16, 4),
    _case("raw probabilities", [19], 8, 3, norm=0),
    _case("every expert", [3, 1], 4, 4),
    _case("mixed", [1, 6, 1], 8, 3, padding_seqs=2, padding_rows=3),
)
