"""Linear projection in BF16, for few tokens: what the eager backend has on a GPU in the place of ``aten::linear``."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.linear.cases import CASES
from qwen4exp_trt.plugins.linear.launch import launches
from qwen4exp_trt.plugins.linear.reference import reference
from qwen4exp_trt.plugins.spec import OpSpec, TensorArg


def body(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight)


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
    tolerance={torch.bfloat16: 3e-3},
)
