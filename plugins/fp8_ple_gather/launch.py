"""Launches the copy of FP8 table rows."""

from __future__ import annotations

from collections.abc import Iterator

from qwen4exp_trt.plugins.kernels import Call, Launch, c_type
from qwen4exp_trt.plugins.ple_gather.launch import gather_launch, group_rows


def launches(call: Call) -> Iterator[Launch]:
    width = call.dims["E"]
    vector = next(size for size in (8, 4, 2, 1) if width % size == 0)
    defines = (("ROW", width), ("VECTOR", vector), ("OUTPUT", c_type(call["embedding"].dtype)))
    operands = ("rows", "table", "scales")
    yield gather_launch(call, "fp8_ple_gather", defines, width // vector, operands, group_rows(call))
