"""Linear projection in BF16, for few tokens: what the eager backend has on a GPU in the place of ``aten::linear``."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.cost import CostCall, Work
from qwen4exp_trt.plugins.linear.cases import CASES
from qwen4exp_trt.plugins.linear.launch import launches
from qwen4exp_trt.plugins.linear.reference import reference
from qwen4exp_trt.plugins.spec import OpSpec, TensorArg


def body(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight)


def cost(call: CostCall) -> Work:
    return Work(2 * call.dims["T"] * call.dims["N"] * call.dims["K"])


SPEC = OpSpec(
    name="linear",
    version=1,
    inputs=(TensorArg("x", ("T", "K")), TensorArg("weight", ("N", "K"))),
    outputs=(TensorArg("out", ("T", "N")),),
    attrs=(),
    body=body,
    reference=reference,
    cases=CASES,
    launches=launches,
    cost=cost,
    tolerance={torch.bfloat16: 3e-3},
)
