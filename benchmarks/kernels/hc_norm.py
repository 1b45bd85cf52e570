"""Grouped RMSNorm of the residual stack."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from kernel_timing import Timing, cold

HC, HIDDEN = 4, 2560


def measure() -> Iterator[Timing]:
    gain = torch.rand(HC * HIDDEN, device="cuda") + 0.5
    for tokens in (1, 8, 2048):
        stack = torch.randn(tokens, HC * HIDDEN, device="cuda", dtype=torch.bfloat16)

        def work(stack: torch.Tensor = stack) -> torch.Tensor:
            return torch.ops.q4e.hc_norm(stack, gain, HC, 1e-6)

        yield cold(f"hc_norm T={tokens}", work, 4 * stack.numel() + 4 * gain.numel())
