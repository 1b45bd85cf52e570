"""What the device at hand reaches in a large copy, a large read and a large product: what steps are held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_GPU_BYTES, _CPU_BYTES = 4 << 30, 256 << 20
"""Much more than the caches."""
_SHARE = 8
"""Of the memory that is free, a buffer takes no more than one part in so many."""
_GPU_SIZE, _CPU_SIZE = 8192, 1024
"""Rows and columns of the product."""
_ROUNDS = 7


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second."""

    copy: float
    """Read and written ones added up."""
    read: float
    """Of a reduction, which writes nothing."""

    def __str__(self) -> str:
        return f"a copy moves {self.copy / 1e9:,.0f} GB/s (read and written), a reduction reads {self.read / 1e9:,.0f}"


def measure_bandwidth(device: torch.device | str = "cuda", free_bytes: int | None = None) -> Bandwidth:
    """By buffers that are much larger than the caches; smaller ones where little of ``free_bytes`` is left."""
    place = torch.device(device)
    size = _GPU_BYTES if place.type == "cuda" else _CPU_BYTES
    size = size if free_bytes is None else min(size, free_bytes // _SHARE)
    source = torch.empty(size // 4, dtype=torch.float32, device=place).normal_()
    target = torch.empty_like(source)
    copy = median_seconds(lambda: target.copy_(source), place)
    return Bandwidth(2 * source.nbytes / copy, source.nbytes / median_seconds(source.amax, place))


def measure_matmul_rate(device: torch.device | str = "cuda") -> float:
    """Products and sums a second of a square BF16 product of torch with float32 sums."""
    place = torch.device(device)
    size = _GPU_SIZE if place.type == "cuda" else _CPU_SIZE
    left, right = (torch.randn(size, size, device=place).bfloat16() for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / median_seconds(lambda: torch.mm(left, right, out=out), place)


def median_seconds(work: Callable[[], object], device: torch.device | str = "cuda") -> float:
    """Median of a few runs."""
    time_once = _gpu_seconds if torch.device(device).type == "cuda" else _cpu_seconds
    work()
    return statistics.median(time_once(work) for _ in range(_ROUNDS))


def _gpu_seconds(work: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def _cpu_seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
