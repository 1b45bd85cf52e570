"""Selection of 512 groups: short, medium and the longest context; one row a sequence, and drafts of four."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from kernel_timing import Timing, chained, cold

PAGE, DIM, HEADS, MAX_BLOCKS = 16, 128, 4, 4096
BUDGET, RATIO = 2048, 4
CASES = [(context, batch, 1) for context in (2048, 32768, 262144) for batch in (1, 8, 32)] + [
    (262144, 1, 4),
    (262144, 8, 4),
]
CHUNK, CHUNK_CONTEXTS = 8192, (8192, 32768, 131072, 262144)


def measure() -> Iterator[Timing]:
    for context, batch, rows in (*CASES, *((context, 1, CHUNK) for context in CHUNK_CONTEXTS)):
        blocks = context // (PAGE * RATIO)
        cache = torch.randn(batch * blocks, PAGE, DIM, device="cuda").bfloat16()
        queries = torch.randn(batch * rows, HEADS * DIM, device="cuda").bfloat16()
        table = torch.full((batch, MAX_BLOCKS), -1, dtype=torch.int32, device="cuda")
        table[:, :blocks] = torch.randperm(batch * blocks, device="cuda").int().view(batch, blocks)
        starts = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device="cuda")
        lens = torch.full((batch,), context, dtype=torch.int32, device="cuda")
        num_seqs = torch.tensor([batch], dtype=torch.int32, device="cuda")
        args = (queries, cache, starts, lens, table, num_seqs, BUDGET, RATIO)
        count = BUDGET // RATIO
        num_bytes = 2 * queries.numel() + 4 * batch * rows * count
        num_bytes += 2 * cache.numel() if context // RATIO > count else 0
        name = f"qsa_select B={batch} T={rows} context={context}"
        work = partial(torch.ops.q4e.qsa_select, *args)
        yield chained(name, [work], num_bytes) if rows == CHUNK else cold(name, work, num_bytes)
