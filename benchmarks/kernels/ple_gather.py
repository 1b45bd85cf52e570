"""Rows of n-gram tables of every format, on the device and in the host's memory.

The table is much smaller than the released one, but larger than the caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from kernel_timing import Timing, cold, moved_bytes

from qwen4exp_trt.plugins.cost import StepSize
from qwen4exp_trt.runtime.host_memory import map_into_gpu

HEADS, NUM_ROWS = 16, 1 << 20


def tables() -> Iterator[tuple[str, list[torch.Tensor]]]:
    """The op, and its table."""

    def codes(row_bytes: int) -> torch.Tensor:
        return torch.randint(0x38, (NUM_ROWS, row_bytes), dtype=torch.uint8)

    scales = torch.ones(128)
    yield "ple_gather", [codes(320).view(torch.bfloat16)]
    yield "fp8_ple_gather", [codes(160).view(torch.float8_e4m3fn), scales]
    packed, block_scales = codes(80).view(torch.float4_e2m1fn_x2), codes(10).view(torch.float8_e4m3fn)
    yield "nvfp4_ple_gather", [packed, block_scales, scales]


def measure() -> Iterator[Timing]:
    for op, tensors in tables():
        overload = getattr(torch.ops.q4e, op)
        for where in ("device", "host"):
            # Of a table in the host's memory the scales of its shards are on the device.
            is_mapped = [where == "host" and len(tensor) == NUM_ROWS for tensor in tensors]
            pairs = zip(tensors, is_mapped, strict=True)
            table = [map_into_gpu(t, "table") if mapped else t.cuda() for t, mapped in pairs]
            for tokens in (1, 8, 64, 512, 8192):
                rows = torch.randint(NUM_ROWS, (tokens, HEADS), device="cuda")
                args = [rows, *table, *([] if op == "ple_gather" else ["bfloat16"])]
                num_bytes = moved_bytes(op, args, StepSize(1, tokens, 0))
                yield cold(f"{op} in {where} memory, T={tokens}", partial(overload, *args), num_bytes)
