"""Sample operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import normal, sample_batch
from qwen4exp_trt.plugins.spec import Case


def _case(name: str, query_lens: Sequence[int], experts: int, top_k: int, norm: int = 1, **padding: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        H, I, IS = 48, 32, 16  # noqa: E741

        batch = sample_batch(query_lens, [0] * len(query_lens), **padding)

        def weight(*shape: int) -> torch.Tensor:
            return normal(generator, *shape, dtype=dtype, scale=shape[-1] ** -0.5)

        return {
            "x": normal(generator, batch["T"], H, dtype=dtype),
            "router_weight": weight(experts, H),
            "gate_up_proj": weight(experts, 2 * I, H),
            "down_proj": weight(experts, H, I),
            "shared_gate_up_proj": weight(2 * IS, H),
            "shared_down_proj": weight(H, IS),
            "shared_expert_gate": weight(1, H),
            "query_start_loc": batch["query_start_loc"],
            "num_seqs": batch["num_seqs"],
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
