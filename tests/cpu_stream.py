"""A queue of work without a GPU: everything runs at once, and a captured graph runs it again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

_Result = TypeVar("_Result")


class CpuStream:
    """A `qwen4exp_trt.runtime.streams.Stream`."""

    handle = 1

    def __init__(self, device: torch.device | None = None) -> None:
        pass

    def fork(self) -> Any:
        return nullcontext()

    def join(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def capture(self, work: Callable[[], _Result]) -> tuple[Any, _Result]:
        result = work()
        return _Graph(work, result), result

    def event(self) -> Any:
        return _Event()

    def staging(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


class _Event:
    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _Graph:
    def __init__(self, work: Callable[[], Any], result: Mapping[str, Tensor]) -> None:
        self.work, self.result = work, result

    def replay(self) -> None:
        for name, value in self.work().items():
            if value.data_ptr() != self.result[name].data_ptr():
                self.result[name].copy_(value)
