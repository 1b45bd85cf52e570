"""Sample operands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import sample_batch
from qwen4exp_trt.plugins.spec import Case

MULTIPLIERS = (23703573157769, 20109073645365, 8052911324071, 91)
EOS = 7


def _case(
    name: str,
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    ngram_size: int = 3,
    ring: int = 10,
    **padding: int,
) -> Case:
    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        batch = sample_batch(query_lens, context_lens, **padding)
        tokens, slots = batch.pop("T"), batch.pop("num_slots")
        sizes = torch.tensor([20000003, 20000023, 101, 103, 107, 109][: 2 * (ngram_size - 1)])
        vocab = 9  # small, so that the boundary token appears often
        return {
            "input_ids": torch.randint(vocab, (tokens,), generator=generator, dtype=torch.int32),
            "ngram_ids": torch.randint(vocab, (slots, ring), generator=generator, dtype=torch.int32),
            "multipliers": torch.tensor(MULTIPLIERS[:ngram_size]),
            "head_sizes": sizes,
            "head_offsets": sizes.cumsum(0) - sizes,
            **batch,
            "eos_token_id": EOS,
        }

    return Case(name, make)


CASES = (
    _case("decode", [1, 1, 1], [5, 1, 900]),
    _case("fresh", [1, 2, 40], [0, 0, 0], ring=3),
    _case("mixed", [1, 7, 3, 1], [40, 0, 1, 0], padding_seqs=2, padding_rows=3),
    _case("bigrams", [4, 1], [0, 2], ngram_size=2),
    _case("4grams", [9, 1], [1, 2], ngram_size=4, ring=11),
)
