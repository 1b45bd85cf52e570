"""Sample operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import normal, sample_batch
from qwen4exp_trt.plugins.spec import Case

DRAFT_ROWS = 4


def _case(
    name: str, query_lens: Sequence[int], context_lens: Sequence[int], kernel_size: int = 4, **padding: int
) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        batch = sample_batch(query_lens, context_lens, **padding)
        tokens, slots, channels = batch.pop("T"), batch.pop("num_slots"), 48
        return {
            "x": normal(generator, tokens, channels + 16, dtype=dtype),
            "weight": normal(generator, channels, kernel_size, dtype=dtype),
            "conv_state": normal(generator, slots, kernel_size - 1 + DRAFT_ROWS, channels, dtype=dtype),
            **batch,
        }

    return Case(name, make)


CASES = (
    _case("decode", [1, 1, 1], [5, 2, 900]),
    _case("fresh", [1, 2, 9], [0, 0, 0]),
    _case("mixed", [1, 23, 3, 1, 12], [40, 0, 2, 0, 9], padding_seqs=2, padding_rows=3),
    _case("kernel2", [5, 1], [0, 3], kernel_size=2),
)
