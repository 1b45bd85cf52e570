"""What the kernels of one step take, by torch's profiler."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

_NAME_WIDTH = 44
_SHOWN_SHARE = 0.005
"""Of the step; what is below is shown in one line."""
_LONGEST_GAP = 5.0
"""Microseconds without a kernel that still belong to a step."""


@dataclass
class KernelTime:
    """All calls of one kernel in a step; times in microseconds."""

    name: str
    calls: float = 0.0
    runs: float = 0.0
    """From start to end. A kernel may start early and wait for the one before it."""
    adds: float = 0.0
    """From the end of the kernel before it to its own: these add up to the step."""

    def __str__(self) -> str:
        calls = max(self.calls, 1)
        return (
            f"  {self.name:<{_NAME_WIDTH}}{self.calls:>7g}{self.runs:>10.1f}{self.runs / calls:>9.2f}"
            f"{self.adds:>10.1f}{self.adds / calls:>9.2f}"
        )


@dataclass(frozen=True)
class Kernels:
    """The kernels of a step, those first that add most to it."""

    times: list[KernelTime]

    @property
    def all(self) -> KernelTime:
        return _sum("all", self.times)

    def __str__(self) -> str:
        total = self.all
        shown = [time for time in self.times if time.adds >= _SHOWN_SHARE * total.adds]
        lines = [
            f"  {'kernel':<{_NAME_WIDTH}}{'calls':>7}{'runs us':>10}{'a call':>9}{'adds us':>10}{'a call':>9}   share"
        ]
        lines += [
            f"{time}{time.adds / total.adds:>8.1%}"
            for time in (*shown, _sum("others", self.times[len(shown) :]), total)
        ]
        return "\n".join(lines)


def profile_kernels(step: Callable[[], object], rounds: int = 3) -> Kernels:
    """The mean of ``rounds`` calls of ``step``, copies and fills of memory included."""
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(rounds):
            step()
            torch.cuda.synchronize()
    times: dict[str, KernelTime] = {}
    events = [event for event in profiler.events() or () if event.device_type.name == "CUDA"]
    last_end = 0.0
    for event in sorted(events, key=lambda event: event.time_range.end):
        start, end = event.time_range.start, event.time_range.end
        time = times.setdefault(_short(event.name), KernelTime(_short(event.name)))
        time.calls += 1 / rounds
        time.runs += (end - start) / rounds
        time.adds += (end - max(last_end, start - _LONGEST_GAP)) / rounds
        last_end = end
    for time in times.values():
        time.calls = round(time.calls, 2)
    return Kernels(sorted(times.values(), key=lambda time: -time.adds))


def _sum(name: str, times: Iterable[KernelTime]) -> KernelTime:
    total = KernelTime(name)
    for time in times:
        total.calls, total.runs, total.adds = total.calls + time.calls, total.runs + time.runs, total.adds + time.adds
    return total


def _short(name: str) -> str:
    """A kernel's name without its parameters, namespaces and return type."""
    bare = re.sub(r"\(anonymous namespace\)::|at::native::|void |<unnamed>::", "", name)
    return re.sub(r"\(.*$", "", bare)[:_NAME_WIDTH]
