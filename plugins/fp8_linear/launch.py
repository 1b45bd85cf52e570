"""Launches the product with an FP8 weight."""

from __future__ import annotations

from collections.abc import Iterator

from qwen4exp_trt.plugins.kernels import Call, Launch
from qwen4exp_trt.plugins.linear_launch import FP8_BLOCKS, Tokens, Weight, product_launches


def launches(call: Call) -> Iterator[Launch]:
    x = call["x"]
    weight = Weight(FP8_BLOCKS, call["weight"], call["scales"])
    yield from product_launches(call, Tokens(x, x.dtype, x.shape[0]), weight, call["out"])
