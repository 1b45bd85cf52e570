"""The bandwidth of the GPU at hand, by a copy and by a read that are much larger than its cache."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

_BYTES = 4 << 30
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


def measure_bandwidth() -> Bandwidth:
    source = torch.empty(_BYTES // 4, dtype=torch.float32, device="cuda").normal_()
    target = torch.empty_like(source)
    return Bandwidth(2 * _BYTES / median_seconds(lambda: target.copy_(source)), _BYTES / median_seconds(source.amax))


def median_seconds(work: Callable[[], object]) -> float:
    """Median of a few runs."""
    work()
    times = []
    for _ in range(_ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)
