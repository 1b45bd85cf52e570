"""The convolution in front of the gated delta rule at the released sizes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from kernel_timing import Timing, chained, cold, moved_bytes

from qwen4exp_trt.plugins.cost import StepSize

CHANNELS, WIDTH, TAPS, RING = 10_240, 16_384, 4, 11
CONTEXT = 1000
LAYERS = 36


def measure() -> Iterator[Timing]:
    for sequences, rows in ((1, 1), (8, 1), (32, 1), (128, 1), (1, 4), (8, 4), (1, 2048), (1, 8192)):
        operands = _operands(sequences, rows)
        num_bytes = moved_bytes("causal_conv1d", operands, StepSize(sequences, sequences * rows, CONTEXT))
        yield cold(f"causal_conv1d B={sequences} T={rows}", partial(torch.ops.q4e.causal_conv1d, *operands), num_bytes)
    layers = [_operands(1, 1) for _ in range(LAYERS)]
    works = [partial(torch.ops.q4e.causal_conv1d, *operands) for operands in layers]
    num_bytes = moved_bytes("causal_conv1d", layers[0], StepSize(1, 1, CONTEXT))
    yield chained(f"causal_conv1d B=1 T=1, {LAYERS} layers", works, num_bytes)


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
