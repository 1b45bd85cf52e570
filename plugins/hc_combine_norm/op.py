"""The pending hyper-connection combine of the previous block, fused with the grouped RMSNorm of the next read."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.hc_combine_norm.cases import CASES
from qwen4exp_trt.plugins.hc_combine_norm.launch import launches
from qwen4exp_trt.plugins.hc_combine_norm.reference import reference
from qwen4exp_trt.plugins.numerics import grouped_rms_norm
from qwen4exp_trt.plugins.spec import Attr, OpSpec, TensorArg


def body(stack: Tensor, y: Tensor, inject: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    update = inject.float()[:, :, None] * y.float()[:, None, :]
    combined = (stack.float() + update.flatten(1)).to(stack.dtype)
    return combined, grouped_rms_norm(combined, gain, inject.shape[1], eps).to(stack.dtype)


SPEC = OpSpec(
    name="hc_combine_norm",
    version=1,
    inputs=(
        TensorArg("stack", ("T", "HC*H")),
        TensorArg("y", ("T", "H")),
        TensorArg("inject", ("T", "HC")),
        TensorArg("gain", ("HC*H",), "float32"),
    ),
    outputs=(TensorArg("combined", ("T", "HC*H")), TensorArg("normed", ("T", "HC*H"))),
    attrs=(Attr("eps", "float"),),
    body=body,
    reference=reference,
    cases=CASES,
    launches=launches,
    tolerance={torch.float32: 1e-6, torch.bfloat16: 5e-3},
)
