"""flash-linear-attention's kernels of the gated delta rule, without the gated norm behind it.

Of one row: recurrence, gates and L2 norms. Of many: the chunked rule on keys and gates that are ready, and with their
norms and gates.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from kernel_timing import Timing, chained, cold
from peers.sources import use_flash_linear_attention

HK, HV, K, V = 16, 48, 128, 128


def measure(folder: Path) -> Iterator[Timing]:
    fla = use_flash_linear_attention(folder)
    for batch in (1, 8, 32, 128):
        run = partial(fla.fused_recurrent_gated_delta_rule, **_operands(batch, 1), use_qk_l2norm_in_kernel=True)
        state_bytes = 2 * batch * HV * K * V * 4
        yield cold(f"flash-linear-attention fused_recurrent B={batch} T=1", run, state_bytes)
    for rows in (2048, 8192, 32768):
        operands = _operands(1, rows)
        num_bytes = 2 * HV * K * V * 4 + 2 * rows * (2 * HK * K + 2 * HV * V + 3 * HV)
        name = f"flash-linear-attention chunk B=1 T={rows}"
        ready = torch.no_grad()(partial(fla.chunk_gated_delta_rule, **operands))
        yield cold(name, ready, num_bytes)
        yield chained(f"{name}, warm", [ready], num_bytes)
        raw = torch.no_grad()(partial(fla.chunk_gated_delta_rule, **operands, **_gates()))
        yield chained(f"{name}, with norms and gates, warm", [raw], num_bytes)


def _gates() -> dict[str, object]:
    return {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "A_log": torch.randn(HV, device="cuda"),
        "dt_bias": torch.randn(HV, device="cuda"),
    }


def _operands(batch: int, rows: int) -> dict[str, object]:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    return {
        "q": torch.nn.functional.normalize(normal(batch, rows, HK, K), dim=-1),
        "k": torch.nn.functional.normalize(normal(batch, rows, HK, K), dim=-1),
        "v": normal(batch, rows, HV, V),
        "g": -torch.rand(batch, rows, HV, device="cuda"),
        "beta": torch.rand(batch, rows, HV, device="cuda").bfloat16(),
        "initial_state": torch.randn(batch, HV, K, V, device="cuda"),
        "output_final_state": True,
    }
