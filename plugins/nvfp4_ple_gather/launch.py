"""Launches the copy of NVFP4 table rows."""

from __future__ import annotations

from collections.abc import Iterator

from qwen4exp_trt.plugins.kernels import Call, Launch, c_type
from qwen4exp_trt.plugins.ple_gather.launch import gather_launch, group_rows


def launches(call: Call) -> Iterator[Launch]:
    blocks = call.dims["EB"]
    defines = (("BLOCKS", blocks), ("OUTPUT", c_type(call["embedding"].dtype)))
    operands = ("rows", "table", "block_scales", "scales")
    yield gather_launch(call, "nvfp4_ple_gather", defines, 2 * blocks, operands, group_rows(call))
