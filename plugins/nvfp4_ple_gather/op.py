"""Rows of an NVFP4 n-gram table, dequantized and concatenated over the heads of each token."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.cost import CostCall, Work
from qwen4exp_trt.plugins.number_formats import dequantize_nvfp4, scales_of_rows
from qwen4exp_trt.plugins.nvfp4_ple_gather.cases import CASES
from qwen4exp_trt.plugins.nvfp4_ple_gather.launch import launches
from qwen4exp_trt.plugins.nvfp4_ple_gather.reference import reference
from qwen4exp_trt.plugins.spec import Attr, OpSpec, TensorArg


def body(rows: Tensor, table: Tensor, block_scales: Tensor, scales: Tensor, dtype: str) -> Tensor:
    packed = table.view(torch.uint8)[rows]
    values = dequantize_nvfp4(packed, block_scales[rows], scales_of_rows(scales, rows, len(table)))
    return values.flatten(1).to(getattr(torch, dtype))


def cost(call: CostCall) -> Work:
    """A row of the table, and the scale of its shard, for each id."""
    ids = call.dims["T"] * call.dims["P"]
    rows = {name: call.num_bytes[name] // call.dims["R"] * ids for name in ("table", "block_scales")}
    return Work(moved=rows | {"scales": call.num_bytes["scales"] // call.dims["S"] * min(call.dims["S"], ids)})


SPEC = OpSpec(
    name="nvfp4_ple_gather",
    version=1,
    inputs=(
        TensorArg("rows", ("T", "P"), "int64"),
        TensorArg("table", ("R", "16*EB"), "float4_e2m1fn_x2"),
        TensorArg("block_scales", ("R", "EB"), "float8_e4m3fn"),
        TensorArg("scales", ("S",), "float32"),
    ),
    outputs=(TensorArg("embedding", ("T", "16*P*EB")),),
    attrs=(Attr("dtype", "str"),),
    body=body,
    reference=reference,
    cases=CASES,
    launches=launches,
    cost=cost,
    tolerance={torch.float32: 0.0, torch.bfloat16: 2.0**-8},  # one rounding
)
