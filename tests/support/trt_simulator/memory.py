"""What is known of an address: the tensor that it was asked of, and whether its storage still lives.

`Tensor.data_ptr` is where the addresses come from that the package gives to TensorRT, so it is watched from the moment
the first simulator is made.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from qwen4exp_trt.plugins.spec import element_shape
from trt_simulator.errors import SimulatorError

ALIGNMENT = 256
"""What TensorRT asks of every address."""
RAW = torch.uint8
"""Memory of any dtype."""
_HASHED_WHOLE = 1 << 16
_MOST_SEEN = 1 << 14


@dataclass(frozen=True)
class Seen:
    """A tensor that was asked for its address."""

    storage: StorageWeakRef
    storage_address: int
    storage_bytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    is_contiguous: bool

    def live_storage(self) -> torch.UntypedStorage | None:
        return torch.UntypedStorage._new_with_weak_ptr(self.storage.cdata)


@dataclass(frozen=True)
class Region:
    """Bytes of one storage that TensorRT reads or writes."""

    what: str
    address: int
    num_bytes: int
    seen: Seen

    @property
    def end(self) -> int:
        return self.address + self.num_bytes

    def overlaps(self, other: Region) -> bool:
        return self.address < other.end and other.address < self.end

    def check_alive(self) -> torch.UntypedStorage:
        """The storage; `SimulatorError` if it is not what it was when the address was bound."""
        storage = self.seen.live_storage()
        if storage is None:
            raise SimulatorError(f"use after free: the memory of {self.what} was freed after it was bound")
        if (storage.data_ptr(), storage.nbytes()) != (self.seen.storage_address, self.seen.storage_bytes):
            raise SimulatorError(f"use after free: the memory of {self.what} was resized after it was bound")
        return storage

    def tensor(self, dtype: torch.dtype, elements: Sequence[int]) -> Tensor:
        """The memory as a tensor of ``elements``, a shape as TensorRT counts it."""
        storage = self.check_alive()
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        offset = self.address - self.seen.storage_address
        raw = empty.set_(storage, offset, (num_bytes(dtype, elements),), (1,))
        return raw.view(dtype).view(torch_shape(dtype, elements))

    def digest(self) -> int:
        """Of the bytes: tells apart what a test may write."""
        data = self.tensor(RAW, [self.num_bytes]).numpy()
        if self.num_bytes <= _HASHED_WHOLE:
            return zlib.crc32(data)
        words = self.num_bytes // 8 * 8
        return int(data[:words].view("u8").sum()) ^ zlib.crc32(data[words:])


def torch_shape(dtype: torch.dtype, elements: Sequence[int]) -> list[int]:
    """A shape as TensorRT counts it, as torch counts it: two FP4 elements are one."""
    shape = [*elements[:-1], elements[-1] // 2] if dtype == torch.float4_e2m1fn_x2 else list(elements)
    assert element_shape(shape, dtype) == list(elements)
    return shape


def num_bytes(dtype: torch.dtype, elements: Sequence[int]) -> int:
    return math.prod(torch_shape(dtype, elements)) * dtype.itemsize


def _is_first_rows(view: Seen, whole: Seen) -> bool:
    """Whether ``view`` is of the first rows of ``whole``, which is still there, and what addresses were bound for."""
    is_same = view.storage.cdata == whole.storage.cdata and not whole.storage.expired() and view.dtype == whole.dtype
    are_rows = len(view.shape) == len(whole.shape) > 1 and view.shape[1:] == whole.shape[1:]
    return is_same and are_rows and view.is_contiguous and whole.is_contiguous and view.shape[0] <= whole.shape[0]


class Memory:
    """The tensors whose addresses were asked for."""

    def __init__(self) -> None:
        self._seen: dict[int, Seen] = {}
        self._lock = Lock()

    def watch(self) -> None:
        """From now on. Does nothing if it is watched already."""
        ask = torch.Tensor.data_ptr
        if getattr(ask, "watched_by", None) is not None:
            return

        def data_ptr(tensor: Tensor) -> int:
            address = ask(tensor)
            if address:
                self._note(address, tensor)
            return address

        data_ptr.watched_by = self  # type: ignore[attr-defined]
        torch.Tensor.data_ptr = data_ptr  # type: ignore[method-assign]

    def _note(self, address: int, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        shape = tuple(element_shape(tensor.shape, tensor.dtype)) if tensor.dim() else ()
        place = StorageWeakRef(storage), storage.data_ptr(), storage.nbytes()
        seen = Seen(*place, tensor.dtype, shape, tensor.is_contiguous())
        with self._lock:
            before = self._seen.get(address)
            if before is not None and _is_first_rows(seen, before):
                return
            self._seen[address] = seen
            if len(self._seen) > _MOST_SEEN:
                self._seen = {a: other for a, other in self._seen.items() if not other.storage.expired()}

    def region(self, what: str, address: int, size: int) -> Region:
        """The ``size`` bytes at ``address``; `SimulatorError` unless they lie in one live storage."""
        seen = self._at(what, address)
        storage = seen.live_storage()
        assert storage is not None
        start = storage.data_ptr()
        if address + size > start + storage.nbytes():
            raise SimulatorError(
                f"{what} needs {size} bytes at {address:#x}, but the storage there has {storage.nbytes()} and ends "
                f"{address + size - start - storage.nbytes()} bytes earlier"
            )
        if address % ALIGNMENT:
            raise SimulatorError(f"{what} is misaligned: {address:#x} is not a multiple of {ALIGNMENT} bytes in memory")
        return Region(what, address, size, seen)

    def _at(self, what: str, address: int) -> Seen:
        with self._lock:
            exact = self._seen.get(address)
            candidates = list(self._seen.values())
        if exact is not None and not exact.storage.expired():
            return exact
        for seen in candidates:
            storage = seen.live_storage()
            if storage is not None and 0 <= address - storage.data_ptr() < storage.nbytes():
                size = storage.nbytes()
                return Seen(seen.storage, storage.data_ptr(), size, RAW, (size,), True)
        was = " any more: it was freed" if exact is not None else ""
        raise SimulatorError(f"{what} is bound to {address:#x}, which is in no live tensor{was}")


MEMORY = Memory()
