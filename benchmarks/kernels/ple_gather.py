"""Rows of n-gram tables of every format, on the device and in the host's pinned memory.

The table is much smaller than the released one, but larger than the caches.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from kernel_timing import Timing, cold

HEADS, WIDTH, NUM_ROWS = 16, 160, 1 << 20


def tables() -> Iterator[tuple[str, list[torch.Tensor], int]]:
    """The op, its table as bytes, and the bytes of a row."""

    def codes(row_bytes: int) -> torch.Tensor:
        return torch.randint(0x38, (NUM_ROWS, row_bytes), dtype=torch.uint8)

    scales = torch.ones(128)
    yield "ple_gather", [codes(320).view(torch.bfloat16)], 320
    yield "fp8_ple_gather", [codes(160).view(torch.float8_e4m3fn), scales], 160
    packed, block_scales = codes(80).view(torch.float4_e2m1fn_x2), codes(10).view(torch.float8_e4m3fn)
    yield "nvfp4_ple_gather", [packed, block_scales, scales], 90


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).pin_memory().view(tensor.dtype)


def measure() -> Iterator[Timing]:
    for op, tensors, row_bytes in tables():
        overload = getattr(torch.ops.q4e, op)
        for where, table in (("device", [t.cuda() for t in tensors]), ("host", [pinned(t) for t in tensors])):
            for tokens in (1, 8, 64, 512):
                rows = torch.randint(NUM_ROWS, (tokens, HEADS), device="cuda")
                args = [rows, *table, *([] if op == "ple_gather" else ["bfloat16"])]
                num_bytes = tokens * HEADS * (8 + row_bytes + 2 * WIDTH)
                yield cold(f"{op} in {where} memory, T={tokens}", partial(overload, *args), num_bytes)
