"""vLLM's Triton kernels of a hyper-connection read, with cuBLAS for its two projections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from kernel_timing import Timing, chained, cold
from peers.sources import use_vllm_ops
from torch import Tensor
from torch.nn.functional import linear

HC, HIDDEN, RANK, PADDED = 4, 2560, 320, 336
WIDTH = HC * HIDDEN
MODULES = 97


def measure(folder: Path) -> Iterator[Timing]:
    ops = use_vllm_ops(folder, "hc")
    for tokens in (1, 8, 2048):
        stack, y, inject, gain = _normal(tokens, WIDTH), _normal(tokens, HIDDEN), _normal(tokens, HC), _normal(WIDTH)
        gate = _normal(tokens, WIDTH)
        row_bytes = tokens * WIDTH * 2

        def combine_norm(*args: Any) -> Any:
            return ops.hc_combine_norm(*args, 1e-6, HC)

        def gate_mix(*args: Any) -> Any:
            return ops.hc_gate_mix(*args, HC)

        norm_bytes = 3 * row_bytes + row_bytes // 4
        yield cold(f"vLLM hc_combine_norm T={tokens}", _bind(combine_norm, stack, y, inject, gain), norm_bytes)
        yield cold(f"vLLM hc_gate_mix T={tokens}", _bind(gate_mix, stack, gate), 2 * row_bytes + row_bytes // 4)
    for tokens in (1, 8):
        yield _chain(ops, tokens)


def _chain(ops: Any, tokens: int) -> Timing:
    """Whole reads over distinct weights, back to back."""
    down = [_normal(PADDED, WIDTH) for _ in range(MODULES)]
    up = [_normal(WIDTH, RANK) for _ in range(MODULES)]
    stack, y, inject, gain = _normal(tokens, WIDTH), _normal(tokens, HIDDEN), _normal(tokens, HC), _normal(WIDTH)

    def read(down: Tensor, up: Tensor) -> Tensor:
        _, normed = ops.hc_combine_norm(stack, y, inject, gain, 1e-6, HC)
        lowrank = ops.hc_silu(linear(normed, down)[:, :RANK].contiguous(), HC)
        return ops.hc_gate_mix(normed, linear(lowrank, up), HC)

    works = [_bind(read, d, u) for d, u in zip(down, up, strict=True)]
    name = f"vLLM Triton + cuBLAS, {MODULES} reads chained T={tokens}"
    return chained(name, works, 2 * (RANK + HC) * WIDTH + 2 * WIDTH * RANK)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def _bind(work: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    return lambda: work(*args)
