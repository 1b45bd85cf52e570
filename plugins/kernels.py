"""What a CUDA launcher returns: launches of kernels, and the shapes from which it derives them.

A launcher is a pure function of shapes, dtypes and attributes: ``launches(call)`` yields the `Launch`es of one call
of an op. Pointers come later, so the same plan is executed on a GPU by torch's op and by the TensorRT plugin, on the
CPU by the emulator of the tests, and asked by the builder which kernels a bundle needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

SCRATCH_ALIGNMENT = 256
MAX_SHARED_BYTES = 99 * 1024
"""Dynamic and static shared memory of a block on SM120 and SM121."""
MAX_SMS = 192
"""Multiprocessors of the largest GPU; a workspace for it does for all."""
MIN_CAPABILITY = (8, 0)
"""Of any GPU that the kernels are compiled for."""
NUM_SEMAPHORES = 4096
"""Zeroed uint32 counters that a launch may use, if it leaves them zero."""
MOST_PLANS = 4096
"""Plans that a process keeps, each of some kilobytes: of a hundred shapes of steps, since a step makes 15 to 40."""

_ITEM_BYTES = {torch.float4_e2m1fn_x2: 0.5}
_C_TYPES = {torch.bfloat16: "bf16", torch.float32: "float", torch.float8_e4m3fn: "e4m3"}


@dataclass(frozen=True)
class Kernel:
    """An ``extern "C"`` entry of a CUDA source, compiled for some values of its macros.

    ``source`` is a path below ``plugins/``; ``defines`` are ints, floats or C type names (`c_type`).
    """

    source: str
    entry: str
    defines: tuple[tuple[str, int | float | str], ...] = ()


@dataclass(frozen=True)
class TensorRef:
    """An operand or output of the call by name: shape in elements and dtype; its pointer is bound at execution."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ScratchRef:
    """Bytes of the call's workspace; uninitialized."""

    offset: int
    num_bytes: int


@dataclass(frozen=True)
class SemaphoreRef:
    """The zeroed counters, from ``index`` on."""

    index: int = 0


@dataclass(frozen=True)
class F32:
    """A float32 kernel argument; plain ints are int32."""

    value: float


Arg = TensorRef | ScratchRef | SemaphoreRef | F32 | int


@dataclass(frozen=True)
class Launch:
    """One kernel launch: ``threads`` a block, ``shared_bytes`` of dynamic shared memory.

    ``overlaps``: the kernel calls ``wait_for_previous`` as ``include/q4e.cuh`` says and may start early.
    """

    kernel: Kernel
    grid: tuple[int, int, int]
    threads: int
    args: tuple[Arg, ...]
    shared_bytes: int = 0
    overlaps: bool = True


@dataclass
class Call:
    """The shapes of one call of an op, from which its launcher derives launches.

    ``call["x"]`` is the operand or output ``x``; ``dims`` has the bound dims and ``attrs`` the attributes by name.
    ``num_sms`` is the number of multiprocessors of the target, ``capability`` what its instructions are at least.
    """

    tensors: Mapping[str, TensorRef]
    dims: Mapping[str, int]
    attrs: Mapping[str, Any]
    num_sms: int
    capability: tuple[int, int] = MIN_CAPABILITY
    scratch_bytes: int = field(default=0, init=False)

    def __getitem__(self, name: str) -> TensorRef:
        return self.tensors[name]

    def scratch(self, *shape: int, dtype: torch.dtype = torch.float32) -> ScratchRef:
        """A part of the workspace for ``shape`` elements.

        It must not shrink when shapes or `num_sms` grow: TensorRT is told the workspace of the largest.
        """
        num_bytes = math.ceil(math.prod(shape) * item_bytes(dtype))
        offset = self.scratch_bytes
        self.scratch_bytes += -(-num_bytes // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT
        return ScratchRef(offset, num_bytes)


Launcher = Callable[[Call], Iterable[Launch]]


@dataclass(frozen=True, eq=False)
class Plan:
    """The launches of one call and the bytes of workspace that they share. Made once, it is kept and executed often."""

    launches: tuple[Launch, ...]
    scratch_bytes: int


def make_plan(launcher: Launcher, call: Call) -> Plan:
    """Run ``launcher``; launches without a block are left out."""
    launches = tuple(launch for launch in launcher(call) if math.prod(launch.grid))
    for launch in launches:
        assert launch.shared_bytes <= MAX_SHARED_BYTES and launch.threads <= 1024, launch
    return Plan(launches, call.scratch_bytes)


def c_type(dtype: torch.dtype) -> str:
    """The type's name in ``include/q4e.cuh``, for a macro."""
    return _C_TYPES[dtype]


def item_bytes(dtype: torch.dtype) -> float:
    """Bytes of an element; half a byte in FP4."""
    return _ITEM_BYTES.get(dtype, dtype.itemsize)


def define_flags(defines: Sequence[tuple[str, int | float | str]]) -> list[str]:
    """``-D`` values of a kernel's macros."""
    return [f"{name}={value!r}f" if isinstance(value, float) else f"{name}={value}" for name, value in defines]
