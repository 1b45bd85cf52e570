"""What gives the tensors that weight recipes read: files, or any function of a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
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


class RowReader(Protocol):
    """Reads rows from all over some tensors: which tensor and which row of it, both ``[n]``."""

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that have them."""
        ...

    def read(self, tensors: np.ndarray, rows: np.ndarray) -> Tensor:
        """The rows ``[n, ...]`` on the CPU. `FailedRowsError` if some cannot be read."""
        ...

    def forget(self, tensors: np.ndarray, rows: np.ndarray) -> None:
        """See to it that the next read of these rows asks the disk."""
        ...

    def use_threads(self) -> None:
        """Read by threads from now on."""
        ...


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

    def close(self) -> None:
        """Let go of files."""
        ...


class FunctionSource:
    """A `TensorSource` of a function, for tensors that are in memory or are computed."""

    def __init__(self, function: TensorFunction) -> None:
        # A large tensor is asked for once for each group of its rows.
        self.tensor = lru_cache(maxsize=1)(function)

    def describe(self, name: str) -> Described:
        tensor = self.tensor(name)
        return tuple(tensor.shape), tensor.dtype

    def start(self, reads: Sequence[Read]) -> Callable[[], None]:
        for read in reads:
            tensor = self.tensor(read.name)
            read.out.copy_(tensor if read.rows is None else tensor[slice(*read.rows)])
        return _done

    def row_reader(self, names: Sequence[str]) -> RowReader:
        return _FunctionRows(self, names)

    def close(self) -> None:
        self.tensor.cache_clear()


class _FunctionRows:
    """A `RowReader` of a function."""

    paths = ()

    def __init__(self, source: FunctionSource, names: Sequence[str]) -> None:
        self._source, self._names = source, names

    def read(self, tensors: np.ndarray, rows: np.ndarray) -> Tensor:
        shape, dtype = self._source.describe(self._names[0])
        out = torch.empty((len(rows), *shape[1:]), dtype=dtype)
        for tensor in np.unique(tensors):
            places = torch.from_numpy(np.flatnonzero(tensors == tensor))
            whole = self._source.tensor(self._names[tensor])
            out.view(torch.uint8)[places] = whole.view(torch.uint8)[torch.from_numpy(rows)[places]]
        return out

    def forget(self, tensors: np.ndarray, rows: np.ndarray) -> None:
        """Nothing is read ahead."""

    def use_threads(self) -> None:
        """There is nothing to wait for."""


def _done() -> None:
    """There is nothing to wait for."""


def as_source(source: TensorSource | TensorFunction) -> TensorSource:
    return FunctionSource(source) if callable(source) else source
