"""Grouped RMSNorm of the residual stack, one group a stream."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.hc_norm.cases import CASES
from qwen4exp_trt.plugins.hc_norm.launch import launches
from qwen4exp_trt.plugins.hc_norm.reference import reference
from qwen4exp_trt.plugins.numerics import grouped_rms_norm
from qwen4exp_trt.plugins.spec import Attr, OpSpec, TensorArg


def body(stack: Tensor, gain: Tensor, hc_count: int, eps: float) -> Tensor:
    return grouped_rms_norm(stack, gain, hc_count, eps).to(stack.dtype)


SPEC = OpSpec(
    name="hc_norm",
    version=1,
    inputs=(TensorArg("stack", ("T", "W")), TensorArg("gain", ("W",), "float32")),
    outputs=(TensorArg("normed", ("T", "W")),),
    attrs=(Attr("hc_count", "int"), Attr("eps", "float")),
    body=body,
    reference=reference,
    cases=CASES,
    launches=launches,
    tolerance={torch.float32: 1e-6, torch.bfloat16: 3e-3},
)
