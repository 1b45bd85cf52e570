"""The mixtures of experts: router, choice, experts that are read once a step, shared expert, weighted sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from kernel_timing import Timing, Work, cold
from torch import Tensor

from qwen4exp_trt.plugins.experts import route
from qwen4exp_trt.plugins.registry import all_specs

HIDDEN, INNER, EXPERTS, CHOICES = 2560, 640, 512, 10
TOKENS = {
    "nvfp4_moe": (1, 2, 4, 8, 64, 512),
    "nvfp4_routed_moe": (1, 4, 8, 64),
    "fp8_routed_moe": (1, 8),
    "moe": (1, 8),
}


def normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, scale)


def codes(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.uint8, device="cuda").random_()


def projection(kind: str, name: str, rows: int, columns: int, parts: int, lead: tuple[int, ...]) -> dict[str, Tensor]:
    """``parts`` matrices in one operand; gate and up are two."""
    shape = (*lead, parts * rows)
    if kind == "float":
        return {f"{name}_proj": normal(*shape, columns, scale=columns**-0.5)}
    if kind == "nvfp4":
        scales = torch.rand((*lead, parts) if parts > 1 else lead or (1,), device="cuda")
        return {
            f"{name}_proj": codes(*shape, columns // 2).view(torch.float4_e2m1fn_x2),
            f"{name}_block_scales": (codes(*shape, columns // 16) & 0x3F).view(torch.float8_e4m3fn),
            f"{name}_scales": scales * columns**-0.5,
        }
    grid = (*lead, *((parts,) if parts > 1 else ()), -(-rows // 128), -(-columns // 128))
    weight = (codes(*shape, columns) & 0xBF).view(torch.float8_e4m3fn)
    return {f"{name}_proj": weight, f"{name}_scales": torch.rand(grid, device="cuda") * columns**-0.5}


def weights(op: str) -> dict[str, Any]:
    """All operands but the batch."""
    kind = {"moe": "float", "fp8_routed_moe": "fp8"}.get(op, "nvfp4")
    shared_kind = "nvfp4" if op == "nvfp4_moe" else "float"
    return {
        "router_weight": normal(EXPERTS, HIDDEN, scale=HIDDEN**-0.5),
        **projection(kind, "gate_up", INNER, HIDDEN, 2, (EXPERTS,)),
        **projection(kind, "down", HIDDEN, INNER, 1, (EXPERTS,)),
        **projection(shared_kind, "shared_gate_up", INNER, HIDDEN, 2, ()),
        **projection(shared_kind, "shared_down", HIDDEN, INNER, 1, ()),
        "shared_expert_gate": normal(1, HIDDEN, scale=HIDDEN**-0.5),
        "num_experts_per_tok": CHOICES,
        "norm_topk_prob": 1,
    }


def mixture(op: str, operands: dict[str, Any], tokens: int) -> tuple[Work, int, int]:
    """A call for random tokens, the bytes that it has to move, and how many experts are chosen."""
    batch = {
        "x": normal(tokens, HIDDEN),
        "query_start_loc": torch.tensor([0, tokens], dtype=torch.int32, device="cuda"),
        "num_seqs": torch.ones(1, dtype=torch.int32, device="cuda"),
    }
    _, chosen = route(batch["x"], operands["router_weight"], CHOICES, True)
    distinct = len(chosen.unique())

    def num_bytes(name: str, value: Tensor) -> int:
        routed = name.startswith(("gate_up", "down"))
        return value.nbytes * distinct // EXPERTS if routed else value.nbytes

    total = sum(num_bytes(name, value) for name, value in operands.items() if isinstance(value, Tensor))
    args = [(operands | batch)[arg.name] for arg in (*all_specs()[op].inputs, *all_specs()[op].attrs)]
    return lambda: all_specs()[op].overload(*args), total + 2 * batch["x"].nbytes, distinct


def measure() -> Iterator[Timing]:
    for op, counts in TOKENS.items():
        operands = weights(op)
        for tokens in counts:
            work, num_bytes, distinct = mixture(op, operands, tokens)
            yield cold(f"{op} T={tokens}, {distinct} experts", work, num_bytes)
