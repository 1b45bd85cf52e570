"""Launches the product with a BF16 weight."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import Call, Launch
from qwen4exp_trt.plugins.linear_launch import BF16, Tokens, Weight, product_launches


def launches(call: Call) -> Iterator[Launch]:
    x, weight = call["x"], call["weight"]
    if weight.dtype != torch.bfloat16:
        raise PluginError(f"q4e::linear: weight is {weight.dtype}, its kernels take torch.bfloat16; use aten::linear")
    yield from product_launches(call, Tokens(x, x.dtype, x.shape[0]), Weight(BF16, weight), call["out"])
