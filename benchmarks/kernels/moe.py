"""The mixtures of experts: router, choice, experts that are read once a step, shared expert, weighted sum.

Operations of many tokens are those of the chosen experts and of the shared one, without padding and router.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from kernel_timing import Timing, Work, against_matmul, cold, moved_bytes
from torch import Tensor

from qwen4exp_trt.plugins.cost import StepSize
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


MANY_TOKENS = {
    "nvfp4_moe": (512, 2048, 4096, 8192),
    "nvfp4_routed_moe": (2048, 4096, 8192),
    "fp8_routed_moe": (4096,),
    "moe": (4096,),
}
SKEWED_TOKENS = 4096
MATMUL = (8192, 8192, 8192)


def weights(op: str) -> dict[str, Any]:
    """All operands but the batch."""
    return RandomWeights(torch.Generator("cuda").manual_seed(0)).mixture(op, SIZES)


def random_tokens(tokens: int) -> Tensor:
    return torch.randn(tokens, SIZES.hidden, device="cuda", dtype=torch.bfloat16)


def mixture(op: str, operands: dict[str, Any], x: Tensor) -> tuple[Work, int, int]:
    """A call for tokens ``x``, the bytes that it has to move, and how many experts are chosen."""
    batch = {
        "x": x,
        "query_start_loc": torch.tensor([0, len(x)], dtype=torch.int32, device="cuda"),
        "num_seqs": torch.ones(1, dtype=torch.int32, device="cuda"),
    }
    _, chosen = route(x, operands["router_weight"], SIZES.choices, True)
    distinct = len(chosen.unique())
    spec = all_specs()[op]
    args = [(operands | batch)[named.name] for named in (*spec.inputs, *spec.attrs)]
    num_bytes = moved_bytes(op, args, StepSize(1, len(x), 0, distinct_experts=distinct))
    return lambda: spec.overload(*args), num_bytes, distinct


def many(op: str, operands: dict[str, Any], x: Tensor, title: str) -> Timing:
    work, num_bytes, distinct = mixture(op, operands, x)
    flops = 2 * len(x) * 3 * SIZES.hidden * (SIZES.choices * SIZES.inner + SIZES.shared_inner)
    return against_matmul(f"{op} T={len(x)}{title}, {distinct} experts", [work], num_bytes, flops, MATMUL)


def skewed(op: str, operands: dict[str, Any], tokens: int) -> Timing:
    """Zipf's law: the first element of every token lowers an expert's logit by the logarithm of its rank."""
    router, x = operands["router_weight"].clone(), random_tokens(tokens)
    x[:, 0] = 8
    router[:, 0] = -torch.arange(1, SIZES.experts + 1, device="cuda").log() / 8
    return many(op, operands | {"router_weight": router}, x, " skewed")


def measure() -> Iterator[Timing]:
    for op, counts in TOKENS.items():
        operands = weights(op)
        for tokens in counts:
            work, num_bytes, distinct = mixture(op, operands, random_tokens(tokens))
            yield cold(f"{op} T={tokens}, {distinct} experts", work, num_bytes)
        for tokens in MANY_TOKENS[op]:
            yield many(op, operands, random_tokens(tokens), "")
        yield skewed(op, operands, SKEWED_TOKENS)
