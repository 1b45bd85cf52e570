"""All states of a model as one: pages and slots are copied, slots read and written, in every state or in none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.aligned_memory import aligned_empty
from qwen4exp_trt.runtime.specs import NUM_BLOCKS, NUM_SLOTS, StateSpec, extent_of
from qwen4exp_trt.runtime.weights import dtype_from_name

Rows = Mapping[str, Tensor]
"""What one slot holds, by the names of the states: tensors ``spec.shape[1:]``."""


class StatePool(Mapping[str, Tensor]):
    """The state tensors of ``specs`` by name, each on the device where its program reads it.

    ``tensors`` may hold others as well. A page is row ``block`` of every paged state, a slot row ``slot`` of every
    other. Copies are enqueued on the current stream; nothing waits for a GPU. Every method raises before it changes
    anything: `IndexError` for a page or slot that there is not, `ValueError` for rows that are not those of the states.
    """

    def __init__(self, specs: Iterable[StateSpec], tensors: Mapping[str, Tensor]) -> None:
        self.specs = tuple(specs)
        self._tensors = {spec.name: tensors[spec.name] for spec in self.specs}
        assert len(self._tensors) == len(self.specs), "states have names of their own"
        self._pages = {spec.name: self._tensors[spec.name] for spec in self.specs if spec.is_paged}
        self._slots = {spec.name: self._tensors[spec.name] for spec in self.specs if not spec.is_paged}
        self.page_bytes = sum(spec.row_bytes for spec in self.specs if spec.is_paged)
        self.slot_bytes = sum(spec.row_bytes for spec in self.specs if not spec.is_paged)
        for part in (self._pages, self._slots):
            assert len({len(tensor) for tensor in part.values()}) <= 1, "one extent for all pages, one for all slots"

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def joined(self, *others: StatePool) -> StatePool:
        """The states of this pool and of others; pages and slots are common to all, names are not."""
        pools = (self, *others)
        tensors = {name: tensor for pool in pools for name, tensor in pool.items()}
        return StatePool([spec for pool in pools for spec in pool.specs], tensors)

    def copy_page(self, source: int, target: int) -> None:
        """Page ``target`` becomes a copy of page ``source``."""
        _copy(self._pages, source, target)

    def copy_slot(self, source: int, target: int) -> None:
        """Slot ``target`` becomes a copy of slot ``source``."""
        _copy(self._slots, source, target)

    def read_slot(self, slot: int) -> dict[str, Tensor]:
        """A copy of a slot, each state on its own device."""
        return _read(self._slots, slot)

    def write_slot(self, slot: int, rows: Rows) -> None:
        """Slot ``slot`` becomes ``rows``, which may be on another device."""
        _write(self._slots, slot, rows)


def _copy(tensors: Mapping[str, Tensor], source: int, target: int) -> None:
    _check_index(tensors, source)
    _check_index(tensors, target)
    for tensor in tensors.values():
        tensor[target].copy_(tensor[source], non_blocking=True)


def _read(tensors: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    _check_index(tensors, index)
    return {name: tensor[index].clone() for name, tensor in tensors.items()}


def _write(tensors: Mapping[str, Tensor], index: int, rows: Rows) -> None:
    _check_index(tensors, index)
    if rows.keys() != tensors.keys():
        raise ValueError(f"rows of {sorted(rows)}, expected those of the states {sorted(tensors)}")
    for name, tensor in tensors.items():
        found, expected = rows[name], tensor[index]
        if (found.shape, found.dtype) != (expected.shape, expected.dtype):
            raise ValueError(
                f"a row of {name} is {found.dtype} {list(found.shape)}, expected {expected.dtype} "
                f"{list(expected.shape)}"
            )
    for name, tensor in tensors.items():
        tensor[index].copy_(rows[name], non_blocking=True)


def _check_index(tensors: Mapping[str, Tensor], index: int) -> None:
    for name, tensor in tensors.items():
        if not 0 <= index < len(tensor):
            raise IndexError(f"row {index} of {name}, which has {len(tensor)}")


def state_bytes(states: Sequence[StateSpec], num_blocks: int, num_slots: int) -> int:
    """Of all of ``states``."""
    extents = {NUM_BLOCKS: num_blocks, NUM_SLOTS: num_slots}
    return sum(state.row_bytes * extent_of(state.shape[0], extents) for state in states)


def allocate_states(
    specs: tuple[StateSpec, ...], num_blocks: int, num_slots: int, device: torch.device | str = "cpu"
) -> dict[str, Tensor]:
    """Every state buffer by name, filled with its initial value; `BundleError` if there is no memory for them."""
    extents = {NUM_BLOCKS: num_blocks, NUM_SLOTS: num_slots}
    shapes = [[extent_of(dim, extents) for dim in spec.shape] for spec in specs]
    try:
        return {
            spec.name: aligned_empty(shape, dtype_from_name(spec.dtype), device).fill_(spec.init)
            for spec, shape in zip(specs, shapes, strict=True)
        }
    except (RuntimeError, TypeError) as error:  # TypeError: more elements than torch can count
        needed = state_bytes(specs, num_blocks, num_slots)
        raise BundleError(
            f"cannot allocate {needed / 2**30:,.1f} GiB on {device} for the states of {num_slots} sequences and "
            f"{num_blocks} pages; load the bundle with a smaller num_blocks: {error}"
        ) from error
