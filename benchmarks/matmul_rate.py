"""The rate of the GPU at hand in large BF16 products of torch, with which compute-bound work is compared."""

from __future__ import annotations

import torch
from bandwidth import median_seconds

_SIZE = 8192


def measure_matmul_rate() -> float:
    """Products and sums a second of a square product with float32 sums."""
    left, right = (torch.randn(_SIZE, _SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(left)
    return 2 * _SIZE**3 / median_seconds(lambda: torch.mm(left, right, out=out))
