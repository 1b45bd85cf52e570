"""The gated delta rule with gates, norms and states at the released sizes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from kernel_timing import Timing, chained, cold, moved_bytes

from qwen4exp_trt.plugins.cost import StepSize

HK, HV, K, V, DRAFT_ROWS = 16, 48, 128, 128, 8
CONV_WIDTH, VALUE_WIDTH = 2 * HK * K + HV * V, HV * V
DRAFT_WIDTH = CONV_WIDTH - HK * K + 2 * HV
CONTEXT = 1000
LAYERS = 36


def measure() -> Iterator[Timing]:
    for sequences, rows in ((1, 1), (8, 1), (32, 1), (128, 1), (1, 4), (8, 4), (1, 8), (8, 8)):
        operands = _operands(sequences, rows)
        num_bytes, work = _num_bytes(operands, sequences, rows), partial(torch.ops.q4e.gated_delta_rule, *operands)
        yield cold(f"gated_delta_rule B={sequences} T={rows}", work, num_bytes)
    for pending in (3, 7):
        operands = _operands(1, 1, pending)
        num_bytes = _num_bytes(operands, 1, 1) + 2 * pending * DRAFT_WIDTH
        work = partial(torch.ops.q4e.gated_delta_rule, *operands)
        yield cold(f"gated_delta_rule B=1 T=1, {pending} rows replayed", work, num_bytes)
    layers = [_operands(1, 1) for _ in range(LAYERS)]
    works = [partial(torch.ops.q4e.gated_delta_rule, *operands) for operands in layers]
    yield chained(f"gated_delta_rule B=1 T=1, {LAYERS} layers", works, _num_bytes(layers[0], 1, 1))
    for sequences, rows in ((1, 2048), (1, 8192), (1, 32768), (4, 2048)):
        operands = _operands(sequences, rows)
        work = partial(torch.ops.q4e.gated_delta_rule, *operands)
        name, num_bytes = f"gated_delta_rule B={sequences} T={sequences * rows}", _num_bytes(operands, sequences, rows)
        yield cold(name, work, num_bytes)
        yield chained(f"{name}, warm", [work], num_bytes)


def _num_bytes(operands: list[object], sequences: int, rows: int) -> int:
    return moved_bytes("gated_delta_rule", operands, StepSize(sequences, sequences * rows, CONTEXT))


def _operands(sequences: int, rows: int, pending: int = 0) -> list[object]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    tokens = sequences * rows
    metadata = (
        torch.tensor([[CONTEXT - pending, 0]] * sequences),
        rows * torch.arange(sequences + 1),
        torch.full((sequences,), CONTEXT + rows),
        torch.arange(sequences),
        torch.tensor([sequences]),
    )
    return [
        normal(tokens, CONV_WIDTH),
        normal(tokens, CONV_WIDTH + VALUE_WIDTH),
        normal(tokens, 2 * HV),
        normal(HV),
        normal(HV),
        normal(V),
        torch.randn(sequences, HV, K, V, device="cuda"),
        normal(sequences, 2 * DRAFT_ROWS, DRAFT_WIDTH),
        *(value.int().cuda() for value in metadata),
        HK,
        1e-6,
        "sigmoid",
    ]
