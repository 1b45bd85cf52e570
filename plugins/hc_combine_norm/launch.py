"""Launches the combine with the norm behind it."""

from __future__ import annotations

from collections.abc import Iterator

from qwen4exp_trt.plugins.hc_norm.launch import norm_launch
from qwen4exp_trt.plugins.kernels import F32, Call, Launch


def launches(call: Call) -> Iterator[Launch]:
    names = ("stack", "y", "inject", "gain", "combined", "normed")
    args = (*(call[name] for name in names), F32(call.attrs["eps"]))
    stack = call["stack"]
    yield norm_launch("hc_combine_norm", call.dims["HC"], stack.shape, stack.dtype, args)
