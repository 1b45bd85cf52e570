"""Times GPU work by replays of CUDA graphs, beside a copy of the same bytes or a product of as many operations.

`cold` flushes the L2 cache before each call: the work of a graph that flushes and calls, less one that only flushes.
`chained` runs calls on distinct operands back to back, as a model does. A fraction is the time that a copy which moves
the same bytes takes, measured in the same way in the same run, over the time of the call. For work that is bound by its
arithmetic, `against_matmul`, it is the time of as many operations in torch.matmul of BF16, over the time of the call.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from qwen4exp_trt.plugins.cost import StepSize
from qwen4exp_trt.plugins.registry import all_specs

ROUNDS = 15
CALLS = 20
FLUSH_BYTES = 192 << 20
MOST_COPIES = 256

Work = Callable[..., object]


@dataclass(frozen=True)
class Timing:
    """Microseconds a call, and of a copy that moves ``num_bytes`` (read and written bytes added up)."""

    name: str
    microseconds: float
    num_bytes: int
    copy_microseconds: float

    @property
    def fraction(self) -> float:
        return self.copy_microseconds / self.microseconds

    def __str__(self) -> str:
        return (
            f"{self.name:58} {self.microseconds:9.2f} us  {self.num_bytes / 1e6:9.2f} MB  "
            f"{self.num_bytes / self.microseconds / 1e3:7.0f} GB/s  {100 * self.fraction:5.1f} % of a copy"
        )


@dataclass(frozen=True)
class ComputeTiming(Timing):
    """The same with ``flops`` floating point operations, and the microseconds that torch.matmul takes for as many."""

    flops: int
    matmul_microseconds: float

    @property
    def fraction(self) -> float:
        return self.matmul_microseconds / self.microseconds

    def __str__(self) -> str:
        return (
            f"{self.name:58} {self.microseconds:9.2f} us  {self.flops / 1e9:9.2f} GFLOP  "
            f"{self.flops / self.microseconds / 1e6:5.0f} TFLOP/s  {100 * self.fraction:5.1f} % of matmul's "
            f"{self.flops / self.matmul_microseconds / 1e6:.0f}"
        )


def moved_bytes(op: str, args: Sequence[Any], size: StepSize) -> int:
    """What a call of the ``q4e`` op with ``args`` has to read and write in a step of ``size``."""
    spec = all_specs()[op]
    return sum(spec.work(*spec.split_args(args), size).moved.values())


def cold(name: str, work: Work, num_bytes: int) -> Timing:
    """One call with a cold L2 cache. ``work`` has to be safe to capture; it is run a few times first."""
    return Timing(name, _cold_microseconds(work), num_bytes, copy_microseconds(num_bytes))


def chained(name: str, works: Sequence[Work], num_bytes: int) -> Timing:
    """The mean of calls back to back in one graph; ``num_bytes`` of one call. Give enough to overflow the L2 cache."""
    return Timing(name, _chained_microseconds(works), num_bytes, _chained_copy_microseconds(num_bytes))


def against_matmul(
    name: str, works: Sequence[Work], num_bytes: int, flops: int, shape: tuple[int, int, int]
) -> ComputeTiming:
    """`chained`, beside torch.matmul in BF16 of ``shape``: tokens, rows of the weight, columns."""
    tokens, rows, columns = shape
    matmul = _matmul_microseconds(*shape) * flops / (2 * tokens * rows * columns)
    copy = _chained_copy_microseconds(num_bytes)
    return ComputeTiming(name, _chained_microseconds(works), num_bytes, copy, flops, matmul)


@cache
def _matmul_microseconds(tokens: int, rows: int, columns: int) -> float:
    """Of products with distinct weights, larger than the cache altogether."""
    x = torch.randn(tokens, columns, dtype=torch.bfloat16, device="cuda")
    count = min(max(FLUSH_BYTES // (2 * rows * columns), 2), MOST_COPIES)
    weights = [torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") for _ in range(count)]
    return _chained_microseconds([lambda weight=weight: x @ weight.T for weight in weights])


@cache
def copy_microseconds(num_bytes: int) -> float:
    """A copy with a cold cache that reads and writes ``num_bytes`` altogether: the faster of the two kinds."""
    return min(map(_cold_microseconds, _copies(num_bytes)))


@cache
def _chained_copy_microseconds(num_bytes: int) -> float:
    """The same of copies of distinct memory back to back, altogether larger than the cache."""
    count = max(FLUSH_BYTES // max(num_bytes, 1), 4)
    by_kind = zip(*[_copies(num_bytes) for _ in range(min(count, MOST_COPIES))], strict=True)
    return min(map(_chained_microseconds, by_kind))


def _copies(num_bytes: int) -> tuple[Work, Work]:
    """A copy by the memory engine and one by a kernel, of which now one and now the other is faster."""
    source = torch.rand(max(num_bytes // 8, 4), device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source), lambda: torch.add(source, 0, out=target)


def _chained_microseconds(works: Sequence[Work]) -> float:
    for work in works:
        work()
    return _graph_microseconds(lambda: [work() for work in works]) / len(works)


def _cold_microseconds(work: Work) -> float:
    work()

    def flushed_calls() -> None:
        for _ in range(CALLS):
            _flush()
            work()

    return (_graph_microseconds(flushed_calls) - _flush_microseconds()) / CALLS


@cache
def _flush_microseconds() -> float:
    return _graph_microseconds(lambda: [_flush() for _ in range(CALLS)])


@cache
def _flush_buffer() -> torch.Tensor:
    return torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")


def _flush() -> None:
    _flush_buffer().zero_()


def _graph_microseconds(work: Work) -> float:
    """Median of replays of a graph of ``work``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        graph.replay()
    times = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)
