"""Row ids of the n-gram table for the released hash."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from kernel_timing import Timing, cold

HEADS, EOS, VOCAB = 16, 248_044, 248_320
MULTIPLIERS = [23703573157769, 20109073645365, 8052911324071]


def measure() -> Iterator[Timing]:
    sizes = 20_000_003 + 10 * torch.arange(HEADS)
    constants = [value.cuda() for value in (torch.tensor(MULTIPLIERS), sizes, sizes.cumsum(0) - sizes)]
    state = torch.zeros(64, 10, dtype=torch.int32, device="cuda")
    for sequences, rows in ((1, 1), (1, 8), (64, 1), (64, 8), (1, 2048), (1, 8192)):
        tokens = sequences * rows
        metadata = (
            rows * torch.arange(sequences + 1),
            torch.full((sequences,), 100 + rows),
            torch.arange(sequences),
            torch.tensor([sequences]),
        )
        ids = torch.randint(VOCAB, (tokens,), device="cuda", dtype=torch.int32)
        batch = [value.int().cuda() for value in metadata]

        work = partial(torch.ops.q4e.ple_hash, ids, state, *constants, *batch, EOS)
        yield cold(f"ple_hash B={sequences} T={rows}", work, tokens * (4 + 8 * HEADS) + 16 * HEADS + 40 * sequences)
