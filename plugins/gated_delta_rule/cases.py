"""Sample operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import normal, sample_batch
from qwen4exp_trt.plugins.spec import Case

HK, HV, K, V = 2, 6, 16, 24


def _case(
    name: str, query_lens: Sequence[int], context_lens: Sequence[int], gate: str = "sigmoid", **padding: int
) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        batch = sample_batch(query_lens, context_lens, **padding)
        tokens, slots = batch.pop("T"), batch.pop("num_slots")
        conv_dim = 2 * HK * K + HV * V
        return {
            "conv_out": normal(generator, tokens, conv_dim, dtype=dtype),
            "qkvz": normal(generator, tokens, conv_dim + HV * V, dtype=dtype),
            "ba": normal(generator, tokens, 2 * HV, dtype=dtype, scale=2.0),
            "A_log": normal(generator, HV, dtype=dtype),
            "dt_bias": normal(generator, HV, dtype=dtype),
            "norm_weight": (1 + 0.2 * torch.randn(V, generator=generator)).to(dtype),
            "recurrent_state": normal(generator, slots, HV, K, V),
            **batch,
            "num_k_heads": HK,
            "eps": 1e-6,
            "output_gate": gate,
        }

    return Case(name, make)


CASES = (
    _case("decode", [1, 1, 1], [5, 2, 900]),
    _case("fresh", [1, 2, 9], [0, 0, 0], gate="silu"),
    _case("mixed", [1, 7, 65, 1], [40, 0, 2, 0], padding_seqs=2, padding_rows=3),
)
