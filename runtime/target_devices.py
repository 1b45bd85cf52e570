"""What is known about the GPUs that engines are built for: memory, bandwidth, multiprocessors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """What is known about a target."""

    name: str
    usable_bytes: int
    """What a process can have of its memory while the system runs."""
    bytes_per_second: float
    """Of reading memory, as published measurements reached it."""
    matmul_flops: float
    """Of BF16 matrices, products and sums a second, as published measurements reached it."""
    is_unified: bool
    """Whether the host's memory is the same."""
    num_sms: int
    """Multiprocessors."""


DEVICES = {
    "sm121": Device(
        "GB10",
        usable_bytes=114 * 2**30,
        bytes_per_second=233e9,
        matmul_flops=105e12,
        is_unified=True,
        num_sms=48,
    )
}
"""By GPU architecture. A GB10 shows 121.6 GiB, of which 114 to 117 can be used, and its memory runs at 273 GB/s, of
which published measurements reach 231 to 234. A published prompt multiplies 88 TFLOP/s in BF16, 84 % of what is
practical."""
