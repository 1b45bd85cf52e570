"""What steps ask of a GPU's queue of work, as one small object: tests put another in its place that needs no GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from qwen4exp_trt.errors import BundleError

_Result = TypeVar("_Result")


class Event(Protocol):
    """A point of the caller's stream."""

    def record(self) -> None:
        """Put it behind what the caller's stream has now."""
        ...

    def synchronize(self) -> None:
        """Let the host wait until the GPU is there; at once if it was never recorded."""
        ...


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Enqueue it on the caller's stream."""
        ...


class Stream(Protocol):
    """A queue of work beside the caller's, which is torch's current stream.

    Of the two only one has work at a time: what is enqueued in a `fork` comes behind all that the caller has enqueued,
    and what the caller enqueues after a `join` comes behind all of this. Memory that the work reads or writes is the
    caller's, and stays as it is until the `join`.
    """

    @property
    def handle(self) -> int:
        """Of the CUDA stream, for TensorRT."""
        ...

    def fork(self) -> AbstractContextManager[object]:
        """``with stream.fork():`` what is enqueued in the block is enqueued here, behind the caller's work."""
        ...

    def join(self) -> None:
        """Let the caller's stream go on behind this one. The host waits for nothing."""
        ...

    def synchronize(self) -> None:
        """Let the host wait for all of it."""
        ...

    def capture(self, work: Callable[[], _Result]) -> tuple[Graph, _Result]:
        """Record what ``work`` enqueues here instead of running it; and its result, which each replay fills.

        All graphs of a stream share the memory of their results: they are good until the next replay.
        """
        ...

    def event(self) -> Event: ...

    def staging(self, num_bytes: int) -> Tensor:
        """Memory of the host (uint8) that the GPU copies from while the host goes on."""
        ...


class CudaStream:
    """The `Stream` of a GPU."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise BundleError(f"device '{device}': an engine runs on a CUDA GPU; use device 'cuda' or 'cuda:N'")
        self._device, self._stream = device, torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    @property
    def handle(self) -> int:
        return self._stream.cuda_stream

    @contextmanager
    def fork(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def capture(self, work: Callable[[], _Result]) -> tuple[torch.cuda.CUDAGraph, _Result]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            result = work()
        return graph, result

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def staging(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
