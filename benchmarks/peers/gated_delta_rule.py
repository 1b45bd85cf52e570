"""flash-linear-attention's fused recurrent kernel: recurrence, gates and L2 norms, without the gated norm behind."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from kernel_timing import Timing, cold
from peers.sources import use_flash_linear_attention

HK, HV, K, V = 16, 48, 128, 128


def measure(folder: Path) -> Iterator[Timing]:
    fla = use_flash_linear_attention(folder)
    for batch in (1, 8, 32, 128):
        run = partial(fla.fused_recurrent_gated_delta_rule, **_operands(batch))
        state_bytes = 2 * batch * HV * K * V * 4
        yield cold(f"flash-linear-attention fused_recurrent B={batch} T=1", run, state_bytes)


def _operands(batch: int) -> dict[str, object]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    return {
        "q": normal(batch, 1, HK, K),
        "k": normal(batch, 1, HK, K),
        "v": normal(batch, 1, HV, V),
        "g": -torch.rand(batch, 1, HV, device="cuda"),
        "beta": torch.rand(batch, 1, HV, device="cuda").bfloat16(),
        "initial_state": torch.randn(batch, HV, K, V, device="cuda"),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
