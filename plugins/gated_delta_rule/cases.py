"""Sample operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from qwen4exp_trt.plugins.sample_batches import normal, sample_batch
from qwen4exp_trt.plugins.spec import Case

HK, HV, K, V = 2, 6, 16, 24
DRAFT_ROWS = 4


def held_lens(batch: dict[str, Any], context_lens: Sequence[int], pending: Sequence[int], slots: int) -> Tensor:
    """``committed_len`` ``[S, 2]`` when ``pending`` rows of each sequence are not in its state yet.

    The other column is what may lie beside that: an older length, or a longer one of the slot's last owner.
    """
    lens = torch.full((slots, 2), 7, dtype=torch.int32)
    for b, (context, rows) in enumerate(zip(context_lens, pending, strict=True)):
        held = context - rows
        pair = [held, max(held - 3, 0)] if b % 2 else [max(held - 1, 0), held]
        lens[int(batch["slot_ids"][b])] = torch.tensor(pair if context else [1, 1000])
    return lens


def make_operands(
    dtype: torch.dtype,
    generator: Generator,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    pending: Sequence[int],
    heads: tuple[int, int, int, int] = (HK, HV, K, V),
    draft_rows: int = DRAFT_ROWS,
    gate: str = "sigmoid",
    padding_seqs: int = 0,
    padding_rows: int = 0,
) -> dict[str, Any]:
    """Operands of a step; ``heads``: key heads, value heads, key and value dims; ``pending`` as in `held_lens`."""
    num_k_heads, num_v_heads, key_dim, value_dim = heads
    batch = sample_batch(query_lens, context_lens, padding_seqs, padding_rows)
    tokens, slots = batch.pop("T"), batch.pop("num_slots")
    key_width, value_width = num_k_heads * key_dim, num_v_heads * value_dim
    draft_width = key_width + value_width + 2 * num_v_heads
    return {
        "conv_out": normal(generator, tokens, 2 * key_width + value_width, dtype=dtype),
        "qkvz": normal(generator, tokens, 2 * key_width + 2 * value_width, dtype=dtype),
        "ba": normal(generator, tokens, 2 * num_v_heads, dtype=dtype, scale=2.0),
        "A_log": normal(generator, num_v_heads, dtype=dtype),
        "dt_bias": normal(generator, num_v_heads, dtype=dtype),
        "norm_weight": (1 + 0.2 * torch.randn(value_dim, generator=generator)).to(dtype),
        "recurrent_state": normal(generator, slots, num_v_heads, key_dim, value_dim),
        "draft_rows": normal(generator, slots, 2 * draft_rows, draft_width, dtype=dtype),
        "committed_len": held_lens(batch, context_lens, pending, slots),
        **batch,
        "num_k_heads": num_k_heads,
        "eps": 1e-6,
        "output_gate": gate,
    }


def _case(
    name: str,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    pending: Sequence[int],
    gate: str = "sigmoid",
    padding_seqs: int = 0,
    padding_rows: int = 0,
) -> Case:
    def make(dtype: torch.dtype, generator: Generator) -> dict[str, Any]:
        return make_operands(
            dtype,
            generator,
            query_lens,
            context_lens,
            pending,
            gate=gate,
            padding_seqs=padding_seqs,
            padding_rows=padding_rows,
        )

    return Case(name, make)


CASES = (
    _case("decode", [1, 1, 1, 2], [5, 2, 900, 8], [0, 1, 0, 0]),
    _case("draft", [4, 3, 2, 4], [9, 3, 77, 0], [3, 0, 2, 0], gate="silu"),
    _case("fresh", [1, 2, 9], [0, 0, 0], [0, 0, 0], gate="silu"),
    _case("mixed", [1, 7, 65, 1, 3], [40, 0, 2, 0, 12], [3, 0, 1, 0, 2], padding_seqs=2, padding_rows=3),
)
