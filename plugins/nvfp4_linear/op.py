"""Linear projection with an NVFP4 weight and 16-bit (or float32) activations."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.cost import CostCall, Work
from qwen4exp_trt.plugins.number_formats import dequantize_nvfp4
from qwen4exp_trt.plugins.nvfp4_linear.cases import CASES
from qwen4exp_trt.plugins.nvfp4_linear.launch import launches
from qwen4exp_trt.plugins.nvfp4_linear.reference import reference
from qwen4exp_trt.plugins.spec import OpSpec, TensorArg


def body(x: Tensor, weight: Tensor, block_scales: Tensor, row_scales: Tensor) -> Tensor:
    return (x.float() @ dequantize_nvfp4(weight, block_scales, row_scales).T).to(x.dtype)


def cost(call: CostCall) -> Work:
    return Work(2 * call.dims["T"] * call.dims["N"] * 16 * call.dims["KB"])


SPEC = OpSpec(
    name="nvfp4_linear",
    version=1,
    inputs=(
        TensorArg("x", ("T", "16*KB")),
        TensorArg("weight", ("N", "16*KB"), "float4_e2m1fn_x2"),
        TensorArg("block_scales", ("N", "KB"), "float8_e4m3fn"),
        TensorArg("row_scales", ("N",), "float32"),
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
