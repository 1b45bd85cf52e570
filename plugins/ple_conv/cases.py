"""Sample operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import gain, normal, sample_batch
from qwen4exp_trt.plugins.spec import Case


def _case(
    name: str,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    hc_count: int = 4,
    hidden: int = 32,
    ring: int = 17,
    **padding: int,
) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        batch = sample_batch(query_lens, context_lens, **padding)
        tokens, slots, dilation, kernel_size = batch.pop("T"), batch.pop("num_slots"), 3, 4
        width = hc_count * hidden
        return {
            "stack": normal(generator, tokens, width, dtype=dtype),
            "key": normal(generator, tokens, width, dtype=dtype),
            "value": normal(generator, tokens, hidden, dtype=dtype),
            "key_gain": gain(generator, width),
            "query_gain": gain(generator, width),
            "conv_gain": gain(generator, width),
            "conv_weight": normal(generator, width, kernel_size, dtype=dtype),
            "ple_conv_state": normal(generator, slots, ring, width, dtype=dtype),
            **batch,
            "dilation": dilation,
            "eps": 1e-6,
        }

    return Case(name, make)


CASES = (
    _case("decode", [1, 1, 1], [5, 2, 900]),
    _case("fresh", [1, 2, 12], [0, 0, 0], hc_count=2, hidden=20, ring=10),
    _case("mixed", [1, 7, 20, 1], [40, 0, 2, 0], padding_seqs=2, padding_rows=3),
    _case("chunks", [130, 4, 127], [30, 0, 0], hc_count=2, hidden=4, padding_seqs=1, padding_rows=2),
)
