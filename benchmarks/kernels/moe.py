"""The mixtures of experts: router, choice, experts that are read once a step, shared expert, weighted sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from kernel_timing import Timing, Work, cold
from torch import Tensor

from qwen4exp_trt.plugins.experts import route
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.sample_experts import MoeSizes, RandomWeights

SIZES = MoeSizes()
TOKENS = {
    "nvfp4_moe": (1, 2, 4, 8, 64, 512),
    "nvfp4_routed_moe": (1, 4, 8, 64),
    "fp8_routed_moe": (1, 8),
    "moe": (1, 8),
}


def weights(op: str) -> dict[str, Any]:
    """All operands but the batch."""
    return RandomWeights(torch.Generator("cuda").manual_seed(0)).mixture(op, SIZES)


def mixture(op: str, operands: dict[str, Any], tokens: int) -> tuple[Work, int, int]:
    """A call for random tokens, the bytes that it has to move, and how many experts are chosen."""
    batch = {
        "x": torch.randn(tokens, SIZES.hidden, device="cuda", dtype=torch.bfloat16),
        "query_start_loc": torch.tensor([0, tokens], dtype=torch.int32, device="cuda"),
        "num_seqs": torch.ones(1, dtype=torch.int32, device="cuda"),
    }
    _, chosen = route(batch["x"], operands["router_weight"], SIZES.choices, True)
    distinct = len(chosen.unique())

    def num_bytes(name: str, value: Tensor) -> int:
        routed = name.startswith(("gate_up", "down"))
        return value.nbytes * distinct // SIZES.experts if routed else value.nbytes

    total = sum(num_bytes(name, value) for name, value in operands.items() if isinstance(value, Tensor))
    spec = all_specs()[op]
    args = [(operands | batch)[named.name] for named in (*spec.inputs, *spec.attrs)]
    return lambda: spec.overload(*args), total + 2 * batch["x"].nbytes, distinct


def measure() -> Iterator[Timing]:
    for op, counts in TOKENS.items():
        operands = weights(op)
        for tokens in counts:
            work, num_bytes, distinct = mixture(op, operands, tokens)
            yield cold(f"{op} T={tokens}, {distinct} experts", work, num_bytes)
