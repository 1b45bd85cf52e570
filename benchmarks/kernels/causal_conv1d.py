"""The convolution in front of the gated delta rule at the released sizes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from kernel_timing import Timing, chained, cold

CHANNELS, WIDTH, TAPS, RING = 10_240, 16_384, 4, 11
CONTEXT = 1000
LAYERS = 36


def measure() -> Iterator[Timing]:
    for sequences, rows in ((1, 1), (8, 1), (32, 1), (128, 1), (1, 4), (8, 4), (1, 2048), (1, 8192)):
        work = partial(torch.ops.q4e.causal_conv1d, *_operands(sequences, rows))
        yield cold(f"causal_conv1d B={sequences} T={rows}", work, _num_bytes(sequences, rows))
    works = [partial(torch.ops.q4e.causal_conv1d, *_operands(1, 1)) for _ in range(LAYERS)]
    yield chained(f"causal_conv1d B=1 T=1, {LAYERS} layers", works, _num_bytes(1, 1))


def _num_bytes(sequences: int, rows: int) -> int:
    """Read: inputs, those before them, weights. Written: outputs, the ring's rows."""
    return 2 * CHANNELS * (sequences * (2 * rows + TAPS - 1 + min(rows, RING)) + TAPS)


def _operands(sequences: int, rows: int) -> list[torch.Tensor]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    metadata = (
        rows * torch.arange(sequences + 1),
        torch.full((sequences,), CONTEXT + rows),
        torch.arange(sequences),
        torch.tensor([sequences]),
    )
    states = normal(CHANNELS, TAPS), normal(sequences, RING, CHANNELS)
    return [normal(sequences * rows, WIDTH), *states, *(value.int().cuda() for value in metadata)]
