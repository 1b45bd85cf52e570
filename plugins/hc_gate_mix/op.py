"""The up projection of the mixing gates, fused with the gated mean of the normed streams."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from qwen4exp_trt.plugins.cost import CostCall, Work
from qwen4exp_trt.plugins.hc_gate_mix.cases import CASES
from qwen4exp_trt.plugins.hc_gate_mix.launch import launches
from qwen4exp_trt.plugins.hc_gate_mix.reference import reference
from qwen4exp_trt.plugins.hc_mix.op import body as mix
from qwen4exp_trt.plugins.spec import Attr, OpSpec, TensorArg


def body(lowrank: Tensor, up_weight: Tensor, normed: Tensor, hc_count: int) -> Tensor:
    return mix(linear(lowrank, up_weight), normed, hc_count)


def cost(call: CostCall) -> Work:
    return Work(2 * call.dims["T"] * call.dims["W"] * call.dims["LR"])


SPEC = OpSpec(
    name="hc_gate_mix",
    version=1,
    inputs=(TensorArg("lowrank", ("T", "LR")), TensorArg("up_weight", ("W", "LR")), TensorArg("normed", ("T", "W"))),
    outputs=(TensorArg("mixed", ("T", "W // hc_count")),),
    attrs=(Attr("hc_count", "int"),),
    body=body,
    reference=reference,
    cases=CASES,
    launches=launches,
    cost=cost,
    tolerance={torch.float32: 1e-6, torch.bfloat16: 5e-3},
)
