"""Rows of states packed into flat memory: what is kept of a page or a slot, in every tier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen4exp_trt.runtime.specs import StateSpec

_VECTOR_BYTES = 16


@dataclass(frozen=True)
class PackedRow:
    """The bytes of one row of several states, in one flat uint8 tensor for each device that the states are on.

    It is never written again. ``ready`` is the CUDA event behind an asynchronous copy into it, which only a reader on
    the host has to wait for.
    """

    parts: tuple[Tensor, ...]
    ready: Any = None

    @property
    def num_bytes(self) -> int:
        return sum(self._sizes)

    @property
    def memory_bytes(self) -> int:
        """What it takes of the host's memory. Torch rounds pinned memory up to a power of two."""
        return sum(map(_pinned_bytes, self._sizes)) if self.ready is not None else self.num_bytes

    @property
    def _sizes(self) -> list[int]:
        return [part.nbytes for part in self.parts]

    def payload(self) -> list[memoryview]:
        """The bytes of a row on the host, once what is copied into it is there."""
        if self.ready is not None:
            self.ready.synchronize()
        return [part.numpy().data for part in self.parts]


class RowLayout:
    """Where the rows of ``specs``, all pages or all slots, lie in a `PackedRow`. ``tensors`` are the states by name."""

    def __init__(self, specs: Sequence[StateSpec], tensors: Mapping[str, Tensor]) -> None:
        by_device: dict[torch.device, list[StateSpec]] = {}
        for spec in specs:
            by_device.setdefault(tensors[spec.name].device, []).append(spec)
        self._parts = [_Part(device, part, tensors) for device, part in by_device.items()]

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self._parts)

    @property
    def host_bytes(self) -> int:
        """What a row takes in the host's memory."""
        sizes = [part.num_bytes for part in self._parts]
        return sum(map(_pinned_bytes, sizes)) if self._has_gpu else sum(sizes)

    @property
    def _has_gpu(self) -> bool:
        return any(part.device.type == "cuda" for part in self._parts)

    def describe(self) -> list[list[Any]]:
        """Name, dtype and shape of each state's row, in the order of their bytes."""
        return [[spec.name, spec.dtype, list(spec.shape[1:])] for part in self._parts for spec in part.specs]

    def read(self, row: int) -> PackedRow:
        """A copy of a row, on the devices of its states."""
        return PackedRow(tuple(part.read(row) for part in self._parts))

    def write(self, row: int, packed: PackedRow) -> None:
        """Make a row of the states what ``packed`` holds, which may be on the host."""
        for part, flat in zip(self._parts, self.on_device(packed).parts, strict=True):
            part.write(row, flat)

    def rows(self, packed: PackedRow) -> dict[str, Tensor]:
        """Each state's row by the state's name: views of ``packed``."""
        parts = zip(self._parts, packed.parts, strict=True)
        return {name: row for part, flat in parts for name, row in part.rows(flat).items()}

    def on_device(self, packed: PackedRow) -> PackedRow:
        """``packed``, copied to where the states are unless it is there."""
        parts = zip(self._parts, packed.parts, strict=True)
        return PackedRow(tuple(flat.to(part.device, non_blocking=True) for part, flat in parts))

    def on_host(self, packed: PackedRow) -> PackedRow:
        """``packed``, copied to the host (pinned, and not waited for, from a GPU) unless it is there."""
        if all(part.device.type == "cpu" for part in packed.parts):
            return packed
        copies = [_host_copy(part) for part in packed.parts]
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(next(p.device for p in packed.parts if p.device.type == "cuda")))
        return PackedRow(tuple(copies), event)

    def empty(self) -> PackedRow:
        """Unwritten memory of the host."""
        sizes = [part.num_bytes for part in self._parts]
        return PackedRow(tuple(torch.empty(size, dtype=torch.uint8, pin_memory=self._has_gpu) for size in sizes))


class _Part:
    """The states of one device. Rows of whole vectors come first, so that all of them can be copied as vectors."""

    def __init__(self, device: torch.device, specs: Sequence[StateSpec], tensors: Mapping[str, Tensor]) -> None:
        self.device = device
        self.specs = sorted(specs, key=lambda spec: spec.row_bytes % _VECTOR_BYTES != 0)
        self._states = [tensors[spec.name] for spec in self.specs]
        self._matrices = [state.view(len(state), -1).view(torch.uint8) for state in self._states]
        self._ends = np.cumsum([spec.row_bytes for spec in self.specs]).tolist()

    @property
    def num_bytes(self) -> int:
        return self._ends[-1]

    def read(self, row: int) -> Tensor:
        flat = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
        _copy_rows(self._slices(flat), [matrix[row] for matrix in self._matrices])
        return flat

    def write(self, row: int, flat: Tensor) -> None:
        _copy_rows([matrix[row] for matrix in self._matrices], self._slices(flat))

    def rows(self, flat: Tensor) -> dict[str, Tensor]:
        slices = zip(self.specs, self._states, self._slices(flat), strict=True)
        return {spec.name: _as_row(piece, state) for spec, state, piece in slices}

    def _slices(self, flat: Tensor) -> list[Tensor]:
        return [flat[start:end] for start, end in zip([0, *self._ends], self._ends, strict=False)]


def _copy_rows(targets: list[Tensor], sources: list[Tensor]) -> None:
    """All in one kernel, or few."""
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def _as_row(piece: Tensor, state: Tensor) -> Tensor:
    if piece.storage_offset() % state.dtype.itemsize:
        piece = piece.clone()
    return piece.view(state.dtype).view(state.shape[1:])


def _pinned_bytes(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _host_copy(part: Tensor) -> Tensor:
    return torch.empty_like(part, device="cpu", pin_memory=True).copy_(part, non_blocking=True)
