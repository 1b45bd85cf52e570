"""Sample operands. Values are multiples of 1/4, so that every score is exact and ties are common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import sample_batch, sample_block_table
from qwen4exp_trt.plugins.spec import Case

D, RATIO, BLOCK_SIZE = 16, 4, 16


def _case(name: str, query_lens: Sequence[int], context_lens: Sequence[int], budget: int = 16, **padding: int) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        batch = sample_batch(query_lens, context_lens, **padding)
        table, pool = sample_block_table(batch["seq_lens"], BLOCK_SIZE, generator)
        tokens = batch.pop("T")
        batch.pop("num_slots")
        batch.pop("slot_ids")

        def quarters(*shape: int) -> torch.Tensor:
            return (torch.randint(-4, 5, shape, generator=generator) / 4).to(dtype)

        return {
            "index_q": quarters(tokens, 2 * D),
            "index_k_cache": quarters(pool, BLOCK_SIZE // RATIO, D),
            **batch,
            "block_table": table,
            "budget": budget,
            "compress_ratio": RATIO,
        }

    return Case(name, make)


CASES = (
    _case("decode around the budget", [1, 1, 1, 1], [17, 18, 19, 20]),
    _case("decode far past it", [1, 1], [300, 2]),
    _case("fresh", [1, 3, 4, 70], [0, 0, 0, 0]),
    _case("mixed", [1, 17, 2, 1], [143, 60, 2, 0], padding_seqs=2, padding_rows=3),
    _case("budget of one group", [9, 1], [0, 40], budget=4),
)
