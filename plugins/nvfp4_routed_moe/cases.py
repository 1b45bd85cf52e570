"""Sample operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from qwen4exp_trt.plugins.sample_batches import normal, sample_batch, sample_nvfp4
from qwen4exp_trt.plugins.spec import Case


def _sample_experts(generator: Generator, experts: int, rows: int, columns: int, global_scales: int) -> list[Tensor]:
    """`sample_nvfp4` of each expert, stacked."""
    parts = [sample_nvfp4(generator, rows, columns, global_scales=global_scales) for _ in range(experts)]
    return [torch.stack(operand) for operand in zip(*parts, strict=True)]


def sample_routed(
    dtype: torch.dtype, generator: Generator, batch: dict[str, Any], experts: int, hidden: int
) -> dict[str, Any]:
    """Input of a `sample_batch`, router, routed experts and shared-expert gate."""
    inner = 32
    gate_up = _sample_experts(generator, experts, 2 * inner, hidden, global_scales=2)
    down = _sample_experts(generator, experts, hidden, inner, global_scales=1)
    return {
        "x": normal(generator, batch["T"], hidden, dtype=dtype),
        "router_weight": normal(generator, experts, hidden, dtype=dtype, scale=hidden**-0.5),
        **dict(zip(("gate_up_proj", "gate_up_block_scales", "gate_up_scales"), gate_up, strict=True)),
        "down_proj": down[0],
        "down_block_scales": down[1],
        "down_scales": down[2].flatten(),
        "shared_expert_gate": normal(generator, 1, hidden, dtype=dtype, scale=hidden**-0.5),
        "query_start_loc": batch["query_start_loc"],
        "num_seqs": batch["num_seqs"],
    }


def _case(name: str, query_lens: Sequence[int], experts: int, top_k: int, norm: int = 1, **padding: int) -> Case:
    def make(dtype: torch.dtype, generator: Generator) -> dict[str, Any]:
        H, IS = 48, 24
        return {
            **sample_routed(dtype, generator, sample_batch(query_lens, [0] * len(query_lens), **padding), experts, H),
            "shared_gate_up_proj": normal(generator, 2 * IS, H, dtype=dtype, scale=H**-0.5),
            "shared_down_proj": normal(generator, H, IS, dtype=dtype, scale=IS**-0.5),
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
