"""Sampling over the released vocabulary, from float32 logits in which a few tokens stand out."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_timing import Timing, cold

VOCAB, VOCAB_LIMIT = 248_320, 248_077
CASES = {
    "greedy": (0.0, 0, 1.0, 0.0),
    "top-k 20, top-p 0.95": (1.0, 20, 0.95, 0.0),
    "top-p 0.95": (1.0, 0, 0.95, 0.0),
    "min-p 0.05": (1.0, 0, 1.0, 0.05),
    "temperature alone": (1.0, 0, 1.0, 0.0),
}


def measure() -> Iterator[Timing]:
    for rows in (1, 8, 64):
        logits = 2.5 * torch.randn(rows, VOCAB, device="cuda")
        likely = torch.randint(VOCAB, (rows, 40), device="cuda")
        logits.scatter_add_(1, likely, 14 * torch.rand(rows, 40, device="cuda"))
        seeds = torch.arange(rows, device="cuda")
        for name, params in CASES.items():
            columns = [torch.full((rows,), value, device="cuda") for value in params]
            columns[1] = columns[1].int()

            def work(logits: torch.Tensor = logits, columns: list = columns, seeds: torch.Tensor = seeds) -> tuple:
                return torch.ops.q4e.sample_tokens(logits, logits, *columns, seeds, seeds.int(), VOCAB_LIMIT)

            yield cold(f"sample_tokens rows={rows} {name}", work, 4 * rows * VOCAB)
