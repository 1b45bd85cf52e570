"""Products with NVFP4 weights: alone, and chained over the projections of a stack of layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_timing import Timing, Work, against_matmul, chained, cold

LAYERS = 48
SHAPES = {"qkvz": (16384, 2560), "out": (2560, 6144)}
ALONE = {"bar": (2560, 10240), **SHAPES, "qkv": (13312, 2560)}
TOKENS = (1, 4, 8, 16, 32, 64)
MANY = {**SHAPES, "qkv": (13312, 2560), "shared gate_up": (1280, 2560), "shared down": (2560, 640)}
MANY_TOKENS = (128, 256, 512, 2048, 8192)
CHAINED = 8


def weight(rows: int, columns: int) -> tuple[torch.Tensor, ...]:
    codes = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, device="cuda")
    scales = torch.randint(0x20, 0x60, (rows, columns // 16), dtype=torch.uint8, device="cuda")
    return codes.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e4m3fn), torch.rand(rows, device="cuda")


def product(weight: tuple[torch.Tensor, ...], x: torch.Tensor) -> Work:
    return lambda: torch.ops.q4e.nvfp4_linear(x, *weight)


def num_bytes(rows: int, columns: int, tokens: int) -> int:
    """Codes and scales of blocks and rows, and activations in and out."""
    return rows * (columns // 2 + columns // 16 + 4) + 2 * tokens * (rows + columns)


def tokens_of(count: int, columns: int) -> torch.Tensor:
    return torch.randn(count, columns, dtype=torch.bfloat16, device="cuda")


def measure() -> Iterator[Timing]:
    for name, (rows, columns) in ALONE.items():
        operands = weight(rows, columns)
        for tokens in TOKENS[: 3 if name != "bar" else None]:
            work = product(operands, tokens_of(tokens, columns))
            yield cold(f"nvfp4_linear {name} {rows}x{columns} T={tokens}", work, num_bytes(rows, columns, tokens))
    head = weight(248320, 2560)
    for tokens in (1, 8, 64):
        work = product(head, tokens_of(tokens, 2560))
        yield cold(f"nvfp4_linear lm_head 248320x2560 T={tokens}", work, num_bytes(248320, 2560, tokens))
    del head
    stack = {name: [weight(*shape) for _ in range(LAYERS)] for name, shape in SHAPES.items()}
    for tokens in TOKENS:
        works = {
            name: [product(operands, tokens_of(tokens, SHAPES[name][1])) for operands in stack[name]] for name in SHAPES
        }
        for name, shape in SHAPES.items():
            title = f"nvfp4_linear {name} T={tokens}, {LAYERS} layers chained"
            yield chained(title, works[name], num_bytes(*shape, tokens))
        if tokens <= 8:
            both = [work for pair in zip(*works.values(), strict=True) for work in pair]
            mean = sum(num_bytes(*shape, tokens) for shape in SHAPES.values()) // 2
            yield chained(f"nvfp4_linear qkvz and out T={tokens}, {LAYERS} layers chained", both, mean)
    del stack
    yield from _many()


def _many() -> Iterator[Timing]:
    for name, (rows, columns) in MANY.items():
        weights = [weight(rows, columns) for _ in range(CHAINED)]
        for tokens in MANY_TOKENS:
            works = [product(operands, tokens_of(tokens, columns)) for operands in weights]
            title = f"nvfp4_linear {name} {rows}x{columns} T={tokens}, {CHAINED} chained"
            flops = 2 * tokens * rows * columns
            yield against_matmul(title, works, num_bytes(rows, columns, tokens), flops, (tokens, rows, columns))
