"""What the kernels of one step take, by torch's profiler."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_ROUNDS = 3
_NAME_WIDTH = 64


@dataclass(frozen=True)
class KernelTime:
    """All calls of one kernel in a step."""

    name: str
    calls: float
    microseconds: float


@dataclass(frozen=True)
class Kernels:
    """The kernels of a step, the longest first."""

    times: list[KernelTime]

    @property
    def count(self) -> int:
        return round(sum(time.calls for time in self.times))

    @property
    def microseconds(self) -> float:
        return sum(time.microseconds for time in self.times)

    def __str__(self) -> str:
        lines = [f"  {'kernel':<{_NAME_WIDTH}}{'calls':>7}{'us':>10}{'us/call':>9}{'share':>8}"]
        lines += [
            f"  {time.name:<{_NAME_WIDTH}}{time.calls:>7g}{time.microseconds:>10.1f}"
            f"{time.microseconds / time.calls:>9.2f}{time.microseconds / self.microseconds:>8.1%}"
            for time in self.times
        ]
        return "\n".join([*lines, f"  {'all':<{_NAME_WIDTH}}{self.count:>7}{self.microseconds:>10.1f}", ""])


def profile_kernels(step: Callable[[], object]) -> Kernels:
    """The mean of a few calls of ``step``, copies and fills of memory included."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_ROUNDS):
            step()
        torch.cuda.synchronize()
    sums: dict[str, list[float]] = {}
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA:
            entry = sums.setdefault(_short(event.name), [0, 0.0])
            entry[0] += 1 / _ROUNDS
            entry[1] += event.time_range.elapsed_us() / _ROUNDS
    times = [KernelTime(name, round(calls, 2), micros) for name, (calls, micros) in sums.items()]
    return Kernels(sorted(times, key=lambda time: -time.microseconds))


def _short(name: str) -> str:
    """A kernel's name without its parameters, namespaces and return type."""
    bare = re.sub(r"\(anonymous namespace\)::|at::native::|void |<unnamed>::", "", name)
    return re.sub(r"\(.*$", "", bare)[:_NAME_WIDTH]
