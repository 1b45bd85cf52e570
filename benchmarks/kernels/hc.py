"""The ops of a hyper-connection read: one by one, and the reads of a whole model back to back over distinct weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from kernel_timing import Timing, chained, cold
from torch import Tensor
from torch.nn.functional import linear

HC, HIDDEN, RANK = 4, 2560, 320
WIDTH, ROWS = HC * HIDDEN, RANK + HC
MODULES = 97
EPS = 1e-6
WEIGHT_BYTES = 2 * WIDTH * (ROWS + RANK)

Read = tuple[Tensor, Tensor, Tensor]
"""The stack, a block's output and its inject weights: what a read takes and the next read gets."""


def measure() -> Iterator[Timing]:
    for tokens in (1, 8, 2048, 8192):
        yield from _elementwise(tokens)
    for tokens in (1, 8, 64, 512, 2048, 8192):
        yield from _products(tokens)
    yield from _chains()


def _elementwise(tokens: int) -> Iterator[Timing]:
    ops, gain = torch.ops.q4e, torch.rand(WIDTH, device="cuda") + 0.5
    stack, y, inject = _inputs(tokens)
    row_bytes, gain_bytes, y_bytes = 2 * tokens * WIDTH, 4 * WIDTH, 2 * tokens * HIDDEN
    yield cold(f"hc_norm T={tokens}", _bind(ops.hc_norm, stack, gain, HC, EPS), 2 * row_bytes + gain_bytes)
    combine_norm = _bind(ops.hc_combine_norm, stack, y, inject, gain, EPS)
    yield cold(f"hc_combine_norm T={tokens}", combine_norm, 3 * row_bytes + y_bytes + gain_bytes)
    yield cold(f"hc_mix T={tokens}", _bind(ops.hc_mix, stack, stack.clone(), HC), 2 * row_bytes + y_bytes)


def _products(tokens: int) -> Iterator[Timing]:
    ops, normed = torch.ops.q4e, _normal(tokens, WIDTH)
    (weight, up_weight, gain), lowrank = _weights(), _normal(tokens, RANK)
    row_bytes, y_bytes, lowrank_bytes = 2 * tokens * WIDTH, 2 * tokens * HIDDEN, 2 * tokens * RANK
    half = WEIGHT_BYTES // 2
    yield cold(f"hc_project T={tokens}", _bind(ops.hc_project, normed, weight, HC), half + row_bytes + lowrank_bytes)
    yield cold(f"  cuBLAS of it T={tokens}", _bind(linear, normed, weight), half + row_bytes + lowrank_bytes)
    num_bytes = half + row_bytes + y_bytes + lowrank_bytes
    yield cold(f"hc_gate_mix T={tokens}", _bind(ops.hc_gate_mix, lowrank, up_weight, normed, HC), num_bytes)
    yield cold(f"  cuBLAS of its projection T={tokens}", _bind(linear, lowrank, up_weight), num_bytes)
    read = _bind(ops.hc_read, *_inputs(tokens), gain, weight, up_weight, EPS)
    yield cold(f"hc_read T={tokens}", read, WEIGHT_BYTES + 2 * row_bytes + 2 * y_bytes)


def _chains() -> Iterator[Timing]:
    """All reads of a model: each takes the stack of the one before, and its mix as the block's output."""
    weights = [_weights() for _ in range(MODULES)]
    for tokens in (1, 2, 4, 8, 16, 64):
        for name, read in (("hc_read", _read), ("its parts", _read_by_parts), ("cuBLAS", _read_by_cublas)):
            if name == "hc_read" or tokens in (1, 8):
                yield _chain(f"{MODULES} reads chained, {name}, T={tokens}", read, weights, tokens)


def _chain(name: str, read: Callable[..., Read], weights: list[tuple[Tensor, ...]], tokens: int) -> Timing:
    state = _inputs(tokens)

    def work(operands: tuple[Tensor, ...]) -> None:
        nonlocal state
        state = read(*state, *operands)

    num_bytes = WEIGHT_BYTES + 4 * tokens * (WIDTH + HIDDEN)
    return chained(name, [_bind(work, operands) for operands in weights], num_bytes)


def _read(stack: Tensor, y: Tensor, inject: Tensor, weight: Tensor, up_weight: Tensor, gain: Tensor) -> Read:
    return torch.ops.q4e.hc_read(stack, y, inject, gain, weight, up_weight, EPS)


def _read_by_parts(stack: Tensor, y: Tensor, inject: Tensor, weight: Tensor, up_weight: Tensor, gain: Tensor) -> Read:
    combined, normed = torch.ops.q4e.hc_combine_norm(stack, y, inject, gain, EPS)
    lowrank, inject = torch.ops.q4e.hc_project(normed, weight, HC)
    return combined, torch.ops.q4e.hc_gate_mix(lowrank, up_weight, normed, HC), inject


def _read_by_cublas(stack: Tensor, y: Tensor, inject: Tensor, weight: Tensor, up_weight: Tensor, gain: Tensor) -> Read:
    """With our norm and mix, and the fewest kernels between the products."""
    combined, normed = torch.ops.q4e.hc_combine_norm(stack, y, inject, gain, EPS)
    product = linear(normed, weight)
    lowrank, inject = torch.nn.functional.silu(product[:, :RANK]), product[:, RANK:]
    return combined, torch.ops.q4e.hc_mix(linear(lowrank, up_weight), normed, HC), inject


def _weights() -> tuple[Tensor, Tensor, Tensor]:
    """The thin projections, the up projection and the gain of one read."""
    weight, up_weight = _normal(ROWS, WIDTH, scale=WIDTH**-0.5), _normal(WIDTH, RANK, scale=RANK**-0.5)
    return weight, up_weight, torch.rand(WIDTH, device="cuda") + 0.5


def _inputs(tokens: int) -> Read:
    return _normal(tokens, WIDTH), _normal(tokens, HIDDEN), _normal(tokens, HC)


def _normal(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def _bind(work: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: work(*args)
