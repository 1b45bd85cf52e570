"""Gate and convolution of the n-gram embedding at the released sizes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from kernel_timing import Timing, cold, moved_bytes

from qwen4exp_trt.plugins.cost import StepSize

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
        args = (*operands, *gains, weight, state, *batch, DILATION, 1e-6)
        num_bytes = moved_bytes("ple_conv", args, StepSize(sequences, tokens, CONTEXT))
        yield cold(f"ple_conv B={sequences} T={rows}", partial(torch.ops.q4e.ple_conv, *args), num_bytes)
