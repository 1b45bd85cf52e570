"""Attention over the selected tokens of a paged cache, at released sizes: 2,051 tokens for each row."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from kernel_timing import Timing, chained, cold

HEADS, KV_HEADS, HEAD_DIM, PAGE, RATIO, GROUPS = 24, 2, 256, 64, 4, 512
CHUNK = 8192
CONTEXT = 16_383
"""Tokens of a sequence; behind the last complete group there are three more, so that a row reads 2,051."""


def operands(batch: int, rows: int, cache_dtype: torch.dtype = torch.bfloat16, context: int = CONTEXT) -> tuple:
    """``rows`` drafted tokens of each of ``batch`` sequences, the first with a tail of three, with a selection each."""
    length = context - context % RATIO + 3 + rows - 1
    pages = -(-length // PAGE)
    table = torch.randperm(batch * pages, device="cuda").int().reshape(batch, pages)
    shape = (batch * pages, 2, PAGE, KV_HEADS, HEAD_DIM)
    cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(cache_dtype)
    tokens = batch * rows
    complete = (length - rows + 1) // RATIO
    chosen = [torch.randperm(complete, device="cuda")[:GROUPS].sort().values for _ in range(tokens)]
    positions = torch.arange(length - rows, length, device="cuda").int().repeat(batch).expand(3, -1).contiguous()
    return (
        torch.randn(tokens, 2 * (HEADS + KV_HEADS) * HEAD_DIM, device="cuda", dtype=torch.bfloat16),
        *(torch.rand(HEAD_DIM, device="cuda") + 0.5 for _ in range(2)),
        positions,
        1e7 ** (-torch.arange(32, device="cuda") / 32),
        torch.stack(chosen).int(),
        cache,
        torch.arange(0, tokens + 1, rows, device="cuda").int(),
        torch.full((batch,), length, dtype=torch.int32, device="cuda"),
        table,
        torch.tensor([batch], dtype=torch.int32, device="cuda"),
        *(HEADS, [11, 11, 10], RATIO, 1e-6),
    )


def measure() -> Iterator[Timing]:
    for cache_dtype, name in ((torch.bfloat16, "BF16"), (torch.float8_e4m3fn, "FP8")):
        for batch, rows in ((1, 1), (1, 4), (8, 1), (8, 4), (32, 1), (64, 1)):
            args = operands(batch, rows, cache_dtype)
            selected = GROUPS * RATIO + 3
            num_bytes = batch * rows * 2 * KV_HEADS * HEAD_DIM * selected * cache_dtype.itemsize

            def work(args: tuple = args) -> torch.Tensor:
                return torch.ops.q4e.qsa_attention(*args)

            yield cold(f"qsa_attention B={batch} rows={rows} over {selected} tokens, {name}", work, num_bytes)
        args = operands(1, CHUNK, cache_dtype)
        work = partial(torch.ops.q4e.qsa_attention, *args)
        yield chained(f"qsa_attention B=1 rows={CHUNK}, random selections, {name}", [work], args[6].nbytes)
