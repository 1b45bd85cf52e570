"""Sample operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import gain, normal, sample_batch, sample_block_table, sample_positions
from qwen4exp_trt.plugins.spec import Case

D, RATIO, BLOCK_SIZE = 24, 4, 16


def inv_freq(rotary_dim: int) -> torch.Tensor:
    return 10000.0 ** -(torch.arange(0, rotary_dim, 2).float() / rotary_dim)


def _case(
    name: str, query_lens: Sequence[int], context_lens: Sequence[int], spread: bool = False, **padding: int
) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        batch = sample_batch(query_lens, context_lens, **padding)
        table, pool = sample_block_table(batch["seq_lens"], BLOCK_SIZE, generator)
        positions = sample_positions(batch, spread)
        tokens, slots = batch.pop("T"), batch.pop("num_slots")
        return {
            "index_qk": normal(generator, tokens, 3 * D, dtype=dtype),
            "q_gain": gain(generator, D),
            "k_gain": gain(generator, D),
            "positions": positions,
            "inv_freq": inv_freq(16),
            "index_k_cache": normal(generator, pool, BLOCK_SIZE // RATIO, D, dtype=dtype),
            "index_k_ring": normal(generator, slots, RATIO, D, dtype=dtype),
            "index_position_ring": torch.randint(900, (slots, RATIO, 3), generator=generator, dtype=torch.int32),
            **batch,
            "block_table": table,
            "mrope_section": [3, 3, 2],
            "compress_ratio": RATIO,
            "eps": 1e-6,
        }

    return Case(name, make)


CASES = (
    _case("decode", [1, 1, 1, 1], [4, 5, 6, 7]),
    _case("fresh", [1, 3, 4, 19], [0, 0, 0, 0]),
    _case("mixed", [1, 7, 2, 1], [43, 0, 2, 0], padding_seqs=2, padding_rows=3),
    _case("image positions", [9, 1], [2, 31], spread=True),
)
