"""Launches the rounding of the activations and the product with an NVFP4 weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import F32, Call, Kernel, Launch, c_type
from qwen4exp_trt.plugins.linear_launch import NVFP4, Tokens, Weight, product_launches

BLOCK, THREADS = 16, 128


def launches(call: Call) -> Iterator[Launch]:
    x, input_scale = call["x"], torch.tensor(call.attrs["input_scale"], dtype=torch.float32).item()
    if not 0 < input_scale < float("inf"):
        raise PluginError(
            f"nvfp4_w4a4_linear: the input scale is {call.attrs['input_scale']!r}; it must be positive and finite"
        )
    tokens, columns = x.shape
    rounded, blocks = call.scratch(tokens, columns, dtype=torch.bfloat16), tokens * columns // BLOCK
    yield Launch(
        Kernel("nvfp4_w4a4_linear/kernel.cu", "round_activations", (("ACTIVATION", c_type(x.dtype)),)),
        grid=(-(-blocks // THREADS), 1, 1),
        threads=THREADS,
        args=(x, rounded, F32(input_scale), blocks),
    )
    weight = Weight(NVFP4, call["weight"], call["block_scales"], call["alpha"])
    yield from product_launches(call, Tokens(rounded, torch.bfloat16, tokens), weight, call["out"])
