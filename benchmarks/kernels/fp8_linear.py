"""Products with FP8 weights: alone, and chained over the projections of a stack of layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_timing import Timing, Work, against_matmul, chained, cold

LAYERS = 24
SHAPES = {"qkvz": (16384, 2560), "out": (2560, 6144)}
TOKENS = (1, 8, 64)
MANY_TOKENS, CHAINED = 2048, 4


def product(rows: int, columns: int, tokens: int) -> Work:
    codes = torch.randint(0, 0x7F, (rows, columns), dtype=torch.uint8, device="cuda").view(torch.float8_e4m3fn)
    scales = torch.rand(rows // 128, columns // 128, device="cuda")
    x = torch.randn(tokens, columns, dtype=torch.bfloat16, device="cuda")
    return lambda: torch.ops.q4e.fp8_linear(x, codes, scales)


def measure() -> Iterator[Timing]:
    for tokens in TOKENS:
        for name, (rows, columns) in SHAPES.items():
            num_bytes = rows * columns + 4 * rows * columns // 16384 + 2 * tokens * (rows + columns)
            works = [product(rows, columns, tokens) for _ in range(LAYERS)]
            yield cold(f"fp8_linear {name} {rows}x{columns} T={tokens}", works[0], num_bytes)
            yield chained(f"fp8_linear {name} T={tokens}, {LAYERS} layers chained", works, num_bytes)
    for name, (rows, columns) in SHAPES.items():
        num_bytes = rows * columns + 2 * MANY_TOKENS * (rows + columns)
        works = [product(rows, columns, MANY_TOKENS) for _ in range(CHAINED)]
        title = f"fp8_linear {name} {rows}x{columns} T={MANY_TOKENS}, {CHAINED} chained"
        flops = 2 * MANY_TOKENS * rows * columns
        yield against_matmul(title, works, num_bytes, flops, (MANY_TOKENS, rows, columns))
