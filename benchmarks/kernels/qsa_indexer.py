"""Index queries and keys of one row a sequence, of drafts, and of a chunk of a prompt."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_timing import Timing, cold

PAGE, DIM, HEADS, RATIO, RING, HALF, MAX_BLOCKS = 16, 128, 4, 4, 11, 32, 4096


def measure() -> Iterator[Timing]:
    gains = torch.rand(DIM, device="cuda") + 0.5, torch.rand(DIM, device="cuda") + 0.5
    inv_freq = 1e7 ** -(torch.arange(HALF, device="cuda") / HALF)
    for batch, rows in ((1, 1), (1, 8), (64, 1), (64, 8), (1, 2048), (1, 8192)):
        tokens, context = batch * rows, 4095
        args = (
            torch.randn(tokens, (HEADS + 1) * DIM, device="cuda").bfloat16(),
            *gains,
            torch.arange(context, context + tokens, dtype=torch.int32, device="cuda").expand(3, -1).contiguous(),
            inv_freq,
            torch.randn(batch * 128, PAGE, DIM, device="cuda").bfloat16(),
            torch.randn(batch, RING, DIM, device="cuda").bfloat16(),
            torch.full((batch, RING, 3), 4000, dtype=torch.int32, device="cuda"),
            torch.arange(0, tokens + 1, rows, dtype=torch.int32, device="cuda"),
            torch.full((batch,), context + rows, dtype=torch.int32, device="cuda"),
            torch.arange(batch, dtype=torch.int32, device="cuda"),
            torch.arange(batch * 128, dtype=torch.int32, device="cuda").view(batch, 128).repeat(1, MAX_BLOCKS // 128),
            torch.tensor([batch], dtype=torch.int32, device="cuda"),
        )
        keys = batch * ((context + rows) // RATIO - context // RATIO)
        num_bytes = 2 * DIM * (tokens * (2 * HEADS + 1) + batch * (RATIO - 1 + min(rows, RING)) + keys)
        name = f"qsa_indexer B={batch} T={rows}"
        yield cold(name, lambda args=args: torch.ops.q4e.qsa_indexer(*args, [11, 11, 10], RATIO, 1e-6), num_bytes)
