"""Launches the rounding of the activations and the product with an NVFP4 weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import F32, Call, Kernel, Launch, c_type
from qwen4exp_trt.plugins.linear_launch import MOST_TOKENS_OF_A_TILE, NVFP4, Tokens, Weight, product_launches

BLOCK, THREADS = 16, 128
BLOCK_SCALED_CAPABILITY = (12, 0)
"""From which on tensor cores multiply FP4 with block scales."""
TILE, TILE_THREADS, STAGES, STAGE_COLUMNS = 128, 256, 4, 128
"""Tokens and rows of a tile of ``block_scaled.cu``, its threads, and its stages of K."""


def launches(call: Call) -> Iterator[Launch]:
    x, input_scale = call["x"], torch.tensor(call.attrs["input_scale"], dtype=torch.float32).item()
    if not 0 < input_scale < float("inf"):
        raise PluginError(
            f"nvfp4_w4a4_linear: the input scale is {call.attrs['input_scale']!r}; it must be positive and finite"
        )
    tokens, columns = x.shape
    is_new = call.capability >= BLOCK_SCALED_CAPABILITY
    if is_new and tokens > MOST_TOKENS_OF_A_TILE and columns % STAGE_COLUMNS == 0:
        yield from _block_scaled(call, input_scale)
        return
    rounded, blocks = call.scratch(tokens, columns, dtype=torch.bfloat16), tokens * columns // BLOCK
    yield Launch(
        Kernel("nvfp4_w4a4_linear/kernel.cu", "round_activations", (("ACTIVATION", c_type(x.dtype)),)),
        grid=(-(-blocks // THREADS), 1, 1),
        threads=THREADS,
        args=(x, rounded, F32(input_scale), blocks),
    )
    weight = Weight(NVFP4, call["weight"], call["block_scales"], call["alpha"])
    yield from product_launches(call, Tokens(rounded, torch.bfloat16, tokens), weight, call["out"])


def _block_scaled(call: Call, input_scale: float) -> Iterator[Launch]:
    x, weight, out = call["x"], call["weight"], call["out"]
    tokens, columns = x.shape
    blocks, rows = tokens * columns // BLOCK, weight.shape[0]
    codes = call.scratch(tokens, columns // 2, dtype=torch.uint8)
    scales = call.scratch(tokens, columns // BLOCK, dtype=torch.uint8)
    yield Launch(
        Kernel("nvfp4_w4a4_linear/kernel.cu", "quantize_activations", (("ACTIVATION", c_type(x.dtype)),)),
        grid=(-(-blocks // THREADS), 1, 1),
        threads=THREADS,
        args=(x, codes, scales, F32(input_scale), blocks),
    )
    yield Launch(
        Kernel("nvfp4_w4a4_linear/block_scaled.cu", "block_scaled", (("OUTPUT", c_type(out.dtype)),)),
        grid=(-(-tokens // TILE), -(-rows // TILE), 1),
        threads=TILE_THREADS,
        args=(codes, scales, weight, call["block_scales"], call["alpha"], out, tokens, rows, columns),
        shared_bytes=STAGES * 2 * TILE * (STAGE_COLUMNS // 2 + STAGE_COLUMNS // BLOCK),
    )
