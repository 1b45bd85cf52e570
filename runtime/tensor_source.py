"""What gives the tensors that weight recipes read: files, or any function of a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

Described = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype."""

TensorFunction = Callable[[str], Tensor]
"""Gives a tensor by name."""


@dataclass(frozen=True)
class Read:
    """Rows ``start`` to ``stop`` (first dim) of the tensor ``name``, or all of it, and the memory that they go to."""

    name: str
    out: Tensor
    """Contiguous and on the CPU, of the shape and dtype of what is read."""
    rows: tuple[int, int] | None = None


RowReader = Callable[[np.ndarray, np.ndarray], Tensor]
"""Reads rows from all over some tensors: which tensor and which row of it, both ``[n]`` -> ``[n, ...]``."""


class TensorSource(Protocol):
    """Gives tensors, and rows of them, by name."""

    def describe(self, name: str) -> Described:
        """Shape and dtype of a tensor, without reading it. `CheckpointError` for an unknown name."""
        ...

    def start(self, reads: Sequence[Read]) -> Callable[[], None]:
        """Begin to read; what it returns waits for the end. Either may raise `CheckpointError`."""
        ...

    def row_reader(self, names: Sequence[str]) -> RowReader:
        """A reader of rows of these tensors, which are alike but for their number of rows."""
        ...


class FunctionSource:
    """A `TensorSource` of a function, for tensors that are in memory or are computed."""

    def __init__(self, function: TensorFunction) -> None:
        # A large tensor is asked for once for each group of its rows.
        self._tensor = lru_cache(maxsize=1)(function)

    def describe(self, name: str) -> Described:
        tensor = self._tensor(name)
        return tuple(tensor.shape), tensor.dtype

    def start(self, reads: Sequence[Read]) -> Callable[[], None]:
        for read in reads:
            tensor = self._tensor(read.name)
            read.out.copy_(tensor if read.rows is None else tensor[slice(*read.rows)])
        return _done

    def row_reader(self, names: Sequence[str]) -> RowReader:
        shape, dtype = self.describe(names[0])

        def read(tensors: np.ndarray, rows: np.ndarray) -> Tensor:
            out = torch.empty((len(rows), *shape[1:]), dtype=dtype)
            for place, (tensor, row) in enumerate(zip(tensors, rows, strict=True)):
                out.view(torch.uint8)[place] = self._tensor(names[tensor]).view(torch.uint8)[row]
            return out

        return read


def _done() -> None:
    """There is nothing to wait for."""


def as_source(source: TensorSource | TensorFunction) -> TensorSource:
    return FunctionSource(source) if callable(source) else source
