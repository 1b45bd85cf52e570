"""The thin projections of a hyper-connection read: low-rank gate input and inject weights, in one product."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from qwen4exp_trt.plugins.cost import CostCall, Work
from qwen4exp_trt.plugins.hc_project.cases import CASES
from qwen4exp_trt.plugins.hc_project.launch import launches
from qwen4exp_trt.plugins.hc_project.reference import reference
from qwen4exp_trt.plugins.spec import Attr, OpSpec, TensorArg


def body(normed: Tensor, weight: Tensor, hc_count: int) -> tuple[Tensor, Tensor]:
    product = normed.float() @ weight.float().T / hc_count
    lowrank, inject = product[:, :-hc_count], product[:, -hc_count:]
    return silu(lowrank).to(normed.dtype), (2 * torch.sigmoid(inject)).to(normed.dtype)


def cost(call: CostCall) -> Work:
    return Work(2 * call.dims["T"] * call.dims["N"] * call.dims["W"])


SPEC = OpSpec(
    name="hc_project",
    version=1,
    inputs=(TensorArg("normed", ("T", "W")), TensorArg("weight", ("N", "W"))),
    outputs=(TensorArg("lowrank", ("T", "N - hc_count")), TensorArg("inject", ("T", "hc_count"))),
    attrs=(Attr("hc_count", "int"),),
    body=body,
    reference=reference,
    cases=CASES,
    launches=launches,
    cost=cost,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 3e-3},
)
