"""Rows of the n-gram table, concatenated over the heads of each token."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.cost import CostCall, Work
from qwen4exp_trt.plugins.ple_gather.cases import CASES
from qwen4exp_trt.plugins.ple_gather.launch import launches
from qwen4exp_trt.plugins.ple_gather.reference import reference
from qwen4exp_trt.plugins.spec import OpSpec, TensorArg


def body(rows: Tensor, table: Tensor) -> Tensor:
    return table[rows].flatten(1)


def cost(call: CostCall) -> Work:
    """A row of the table for each id."""
    return Work(moved={"table": call.num_bytes["table"] // call.dims["R"] * call.dims["T"] * call.dims["P"]})


SPEC = OpSpec(
    name="ple_gather",
    version=1,
    inputs=(TensorArg("rows", ("T", "P"), "int64"), TensorArg("table", ("R", "E"))),
    outputs=(TensorArg("embedding", ("T", "P*E")),),
    attrs=(),
    body=body,
    reference=reference,
    cases=CASES,
    launches=launches,
    cost=cost,
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
)
