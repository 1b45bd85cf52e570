"""Products with the BF16 weights that the released program keeps, beside cuBLAS."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_timing import Timing, Work, against_matmul, chained, cold
from torch import Tensor
from torch.nn.functional import linear

SHAPES = {
    "b and a": (96, 2560),
    "index_qk": (640, 2560),
    "n-gram value": (2560, 2560),
    "n-gram key": (10240, 2560),
    "out": (2560, 6144),
    "qkvz": (16384, 2560),
}
LAYERS = 24
MANY_TOKENS, CHAINED = 2048, 4


def measure() -> Iterator[Timing]:
    for name, (rows, columns) in SHAPES.items():
        weights = torch.randn(LAYERS, rows, columns, dtype=torch.bfloat16, device="cuda").unbind()
        for tokens in (1, 8):
            x = torch.randn(tokens, columns, dtype=torch.bfloat16, device="cuda")
            num_bytes = 2 * (rows * columns + tokens * (rows + columns))
            for who, product in (("own", torch.ops.q4e.linear), ("cuBLAS", linear)):
                works = [_bind(product, x, weight) for weight in weights]
                title = f"bf16_linear {name} {rows}x{columns} T={tokens} {who}"
                yield cold(title, works[0], num_bytes)
                yield chained(f"{title}, {LAYERS} chained", works, num_bytes)
        many = torch.randn(MANY_TOKENS, columns, dtype=torch.bfloat16, device="cuda")
        works = [_bind(torch.ops.q4e.linear, many, weight) for weight in weights[:CHAINED]]
        num_bytes = 2 * (rows * columns + MANY_TOKENS * (rows + columns))
        title = f"bf16_linear {name} {rows}x{columns} T={MANY_TOKENS} own, {CHAINED} chained"
        flops = 2 * MANY_TOKENS * rows * columns
        yield against_matmul(title, works, num_bytes, flops, (MANY_TOKENS, rows, columns))


def _bind(product: Work, x: Tensor, weight: Tensor) -> Work:
    return lambda: product(x, weight)
