"""Linear projection with an FP8 weight and 16-bit (or float32) activations."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.cost import CostCall, Work
from qwen4exp_trt.plugins.dims import ceil_div
from qwen4exp_trt.plugins.fp8_linear.cases import CASES
from qwen4exp_trt.plugins.fp8_linear.launch import launches
from qwen4exp_trt.plugins.fp8_linear.reference import reference
from qwen4exp_trt.plugins.number_formats import FP8_BLOCK, dequantize_fp8_blocks
from qwen4exp_trt.plugins.spec import OpSpec, TensorArg


def body(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    return (x.float() @ dequantize_fp8_blocks(weight, scales).T).to(x.dtype)


def cost(call: CostCall) -> Work:
    return Work(2 * call.dims["T"] * call.dims["N"] * call.dims["K"])


SPEC = OpSpec(
    name="fp8_linear",
    version=1,
    inputs=(
        TensorArg("x", ("T", "K")),
        TensorArg("weight", ("N", "K"), "float8_e4m3fn"),
        TensorArg("scales", (ceil_div("N", FP8_BLOCK), ceil_div("K", FP8_BLOCK)), "float32"),
    ),
    outputs=(TensorArg("out", ("T", "N")),),
    attrs=(),
    body=body,
    reference=reference,
    cases=CASES,
    launches=launches,
    cost=cost,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 3e-3},
)
