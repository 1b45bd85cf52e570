"""A whole hyper-connection read: combine, norm, thin projections and gated mean."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.cost import CostCall, Work
from qwen4exp_trt.plugins.hc_combine_norm.op import body as combine_norm
from qwen4exp_trt.plugins.hc_gate_mix.op import body as gate_mix
from qwen4exp_trt.plugins.hc_project.op import body as project
from qwen4exp_trt.plugins.hc_read.cases import CASES
from qwen4exp_trt.plugins.hc_read.launch import launches
from qwen4exp_trt.plugins.hc_read.reference import reference
from qwen4exp_trt.plugins.spec import Attr, OpSpec, TensorArg


def body(
    stack: Tensor, y: Tensor, inject: Tensor, gain: Tensor, weight: Tensor, up_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    hc_count = inject.shape[1]
    combined, normed = combine_norm(stack, y, inject, gain, eps)
    lowrank, next_inject = project(normed, weight, hc_count)
    return combined, gate_mix(lowrank, up_weight, normed, hc_count), next_inject


def cost(call: CostCall) -> Work:
    tokens, streams, hidden, rank = (call.dims[name] for name in ("T", "HC", "H", "LR"))
    return Work(2 * tokens * streams * hidden * (rank + streams + rank))


SPEC = OpSpec(
    name="hc_read",
    version=1,
    inputs=(
        TensorArg("stack", ("T", "HC*H")),
        TensorArg("y", ("T", "H")),
        TensorArg("inject", ("T", "HC")),
        TensorArg("gain", ("HC*H",), "float32"),
        TensorArg("weight", ("LR + HC", "HC*H")),
        TensorArg("up_weight", ("HC*H", "LR")),
    ),
    outputs=(
        TensorArg("combined", ("T", "HC*H")),
        TensorArg("mixed", ("T", "H")),
        TensorArg("next_inject", ("T", "HC")),
    ),
    attrs=(Attr("eps", "float"),),
    body=body,
    reference=reference,
    cases=CASES,
    launches=launches,
    cost=cost,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 8e-3},
)
