"""Sample cases of the mixture-of-experts ops, which differ in the formats of their experts' weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator

from qwen4exp_trt.plugins.sample_batches import normal, sample_batch
from qwen4exp_trt.plugins.spec import Case

SampleProjections = Callable[[torch.dtype, Generator, int], dict[str, Any]]
"""(dtype, generator, number of routed experts) -> the operands that are projections."""


def moe_cases(hidden: int, sample_projections: SampleProjections) -> tuple[Case, ...]:
    """The cases of an op whose experts read ``hidden`` features."""

    def case(name: str, query_lens: Sequence[int], experts: int, top_k: int, norm: int = 1, **padding: int) -> Case:
        def make(dtype: torch.dtype, generator: Generator) -> dict[str, Any]:
            batch = sample_batch(query_lens, [0] * len(query_lens), **padding)
            return {
                "x": normal(generator, batch["T"], hidden, dtype=dtype),
                "router_weight": normal(generator, experts, hidden, dtype=dtype, scale=hidden**-0.5),
                **sample_projections(dtype, generator, experts),
                "shared_expert_gate": normal(generator, 1, hidden, dtype=dtype, scale=hidden**-0.5),
                "query_start_loc": batch["query_start_loc"],
                "num_seqs": batch["num_seqs"],
                "num_experts_per_tok": top_k,
                "norm_topk_prob": norm,
            }

        return Case(name, make)

    return (
        case("one token", [1], 16, 4),
        case("raw probabilities", [19], 8, 3, norm=0),
        case("every expert", [3, 1], 4, 4),
        case("mixed", [1, 6, 1], 8, 3, padding_seqs=2, padding_rows=3),
    )


def sample_shared_expert(dtype: torch.dtype, generator: Generator, hidden: int, inner: int) -> dict[str, Any]:
    """The projections of a shared expert in the activation dtype."""
    return {
        "shared_gate_up_proj": normal(generator, 2 * inner, hidden, dtype=dtype, scale=hidden**-0.5),
        "shared_down_proj": normal(generator, hidden, inner, dtype=dtype, scale=inner**-0.5),
    }
