"""The gated mean of the normed streams that a block reads."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.hc_mix.cases import CASES
from qwen4exp_trt.plugins.hc_mix.launch import launches
from qwen4exp_trt.plugins.hc_mix.reference import reference
from qwen4exp_trt.plugins.spec import Attr, OpSpec, TensorArg


def body(gate_logits: Tensor, normed: Tensor, hc_count: int) -> Tensor:
    gated = torch.sigmoid(gate_logits.float()) * normed.float()
    return gated.unflatten(1, (hc_count, -1)).mean(1).to(normed.dtype)


SPEC = OpSpec(
    name="hc_mix",
    version=1,
    inputs=(TensorArg("gate_logits", ("T", "W")), TensorArg("normed", ("T", "W"))),
    outputs=(TensorArg("mixed", ("T", "W // hc_count")),),
    attrs=(Attr("hc_count", "int"),),
    body=body,
    reference=reference,
    cases=CASES,
    launches=launches,
    tolerance={torch.float32: 1e-6, torch.bfloat16: 3e-3},
)
