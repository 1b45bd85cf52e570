"""Sample operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qwen4exp_trt.plugins.number_formats import e4m3_from_float
from qwen4exp_trt.plugins.qsa_indexer.cases import inv_freq
from qwen4exp_trt.plugins.sample_batches import gain, normal, sample_batch, sample_block_table, sample_positions
from qwen4exp_trt.plugins.spec import Case

HQ, HKV, D, RATIO, BLOCK_SIZE, GROUPS = 6, 2, 24, 4, 16, 4


def _selection(batch: dict[str, Any], generator: torch.Generator) -> torch.Tensor:
    """Up to GROUPS distinct complete groups per row, ascending, padded with -1."""
    selected = torch.full((batch["T"], GROUPS), -1, dtype=torch.int32)
    starts = batch["query_start_loc"].tolist()
    for b in range(int(batch["num_seqs"])):
        for t in range(starts[b], starts[b + 1]):
            visible = (int(batch["seq_lens"][b]) - (starts[b + 1] - t) + 1) // RATIO
            chosen = torch.randperm(visible, generator=generator)[:GROUPS].sort().values
            selected[t, : len(chosen)] = chosen.int()
    return selected


def _case(
    name: str,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    dense: bool = False,
    spread: bool = False,
    fp8: bool = False,
    **padding: int,
) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        batch = sample_batch(query_lens, context_lens, **padding)
        table, pool = sample_block_table(batch["seq_lens"], BLOCK_SIZE, generator)
        positions = sample_positions(batch, spread)
        selected = torch.full((1, 1), -1, dtype=torch.int32) if dense else _selection(batch, generator)
        tokens = batch.pop("T")
        cache = normal(generator, pool, 2, BLOCK_SIZE, HKV, D, dtype=dtype)
        batch.pop("num_slots")
        batch.pop("slot_ids")
        return {
            "qkv": normal(generator, tokens, 2 * (HQ + HKV) * D, dtype=dtype),
            "q_gain": gain(generator, D),
            "k_gain": gain(generator, D),
            "positions": positions,
            "inv_freq": inv_freq(16),
            "selected_groups": selected,
            "kv_cache": e4m3_from_float(cache) if fp8 else cache,
            **batch,
            "block_table": table,
            "num_heads": HQ,
            "mrope_section": [3, 3, 2],
            "compress_ratio": 0 if dense else RATIO,
            "eps": 1e-6,
        }

    return Case(name, make)


CASES = (
    _case("decode", [1, 1, 1, 1], [15, 16, 46, 0]),
    _case("fresh", [1, 3, 4, 35], [0, 0, 0, 0]),
    _case("mixed", [1, 7, 2, 1], [43, 20, 2, 0], padding_seqs=2, padding_rows=3),
    _case("dense", [5, 1], [0, 30], dense=True),
    _case("decode, FP8 cache", [1, 1, 1, 1], [15, 16, 46, 0], fp8=True),
    _case("mixed, FP8 cache", [1, 7, 2, 1], [43, 20, 2, 0], fp8=True, padding_seqs=2, padding_rows=3),
    _case("image positions", [9, 1], [2, 31], spread=True),
)
