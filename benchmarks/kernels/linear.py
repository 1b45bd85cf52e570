"""The projections that stay in BF16: this project's kernel beside cuBLAS, alone and chained over a stack of layers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_timing import Timing, Work, chained, cold

SHAPES = {
    "b and a": (96, 2560),
    "index_qk": (640, 2560),
    "n-gram key": (10240, 2560),
    "n-gram value": (2560, 2560),
    "qkvz": (16384, 2560),
    "out": (2560, 6144),
}
LAYERS = 24


def measure() -> Iterator[Timing]:
    for name, (rows, columns) in SHAPES.items():
        weights = torch.randn(LAYERS, rows, columns, dtype=torch.bfloat16, device="cuda").unbind()
        for tokens in (1, 8):
            x = torch.randn(tokens, columns, dtype=torch.bfloat16, device="cuda")
            own: list[Work] = [lambda x=x, weight=weight: torch.ops.q4e.linear(x, weight) for weight in weights]
            peer: list[Work] = [lambda x=x, weight=weight: torch.nn.functional.linear(x, weight) for weight in weights]
            num_bytes = 2 * (rows * columns + tokens * (rows + columns))
            for who, works in (("own", own), ("cuBLAS", peer)):
                title = f"linear {name} {rows}x{columns} T={tokens} {who}"
                yield cold(title, works[0], num_bytes)
                yield chained(f"{title}, {LAYERS} chained", works, num_bytes)
