"""Rows of an FP8 n-gram table, dequantized and concatenated over the heads of each token."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.cost import CostCall, Work
from qwen4exp_trt.plugins.fp8_ple_gather.cases import CASES
from qwen4exp_trt.plugins.fp8_ple_gather.launch import launches
from qwen4exp_trt.plugins.fp8_ple_gather.reference import reference
from qwen4exp_trt.plugins.number_formats import float_from_e4m3, scales_of_rows
from qwen4exp_trt.plugins.spec import Attr, OpSpec, TensorArg


def body(rows: Tensor, table: Tensor, scales: Tensor, dtype: str) -> Tensor:
    values = float_from_e4m3(table[rows]) * scales_of_rows(scales, rows, len(table)).unsqueeze(-1)
    return values.flatten(1).to(getattr(torch, dtype))


def cost(call: CostCall) -> Work:
    """A row of the table, and the scale of its shard, for each id."""
    ids = call.dims["T"] * call.dims["P"]
    scales = call.num_bytes["scales"] // call.dims["S"] * min(call.dims["S"], ids)
    return Work(moved={"table": call.num_bytes["table"] // call.dims["R"] * ids, "scales": scales})


SPEC = OpSpec(
    name="fp8_ple_gather",
    version=1,
    inputs=(
        TensorArg("rows", ("T", "P"), "int64"),
        TensorArg("table", ("R", "E"), "float8_e4m3fn"),
        TensorArg("scales", ("S",), "float32"),
    ),
    outputs=(TensorArg("embedding", ("T", "P*E")),),
    attrs=(Attr("dtype", "str"),),
    body=body,
    reference=reference,
    cases=CASES,
    launches=launches,
    cost=cost,
    tolerance={torch.float32: 0.0, torch.bfloat16: 2.0**-8},  # one rounding
)
