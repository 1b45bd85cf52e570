"""Gate and convolution of the n-gram embedding at the released sizes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from kernel_timing import Timing, cold

HC, HIDDEN, TAPS, DILATION, RING = 4, 2560, 4, 3, 17
WIDTH = HC * HIDDEN
CONTEXT = 100


def measure() -> Iterator[Timing]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    gains = [torch.rand(WIDTH, device="cuda") + 0.5 for _ in range(3)]
    weight, state = normal(WIDTH, TAPS), normal(64, RING, WIDTH)
    for sequences, rows in ((1, 1), (1, 4), (1, 8), (8, 1), (64, 1), (64, 8), (1, 2048), (1, 8192)):
        tokens = sequences * rows
        operands = normal(tokens, WIDTH), normal(tokens, WIDTH), normal(tokens, HIDDEN)
        metadata = (
            rows * torch.arange(sequences + 1),
            torch.full((sequences,), CONTEXT + rows),
            torch.arange(sequences),
            torch.tensor([sequences]),
        )
        batch = [value.int().cuda() for value in metadata]
        work = partial(torch.ops.q4e.ple_conv, *operands, *gains, weight, state, *batch, DILATION, 1e-6)
        # Read: stack, key, value, and rows of the state from before the step. Written: the stack, N.
        history = sequences * (TAPS - 1) * min(rows, DILATION)
        written = sequences * min(rows, RING)
        num_bytes = 2 * tokens * (3 * WIDTH + HIDDEN) + 2 * WIDTH * (history + written)
        num_bytes += sum(4 * gain.numel() for gain in gains) + 2 * weight.numel()
        yield cold(f"ple_conv B={sequences} T={rows}", work, num_bytes)
