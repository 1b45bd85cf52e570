"""The host's memory: how much a process may still take, and what of it a GPU reads where it is."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen4exp_trt.errors import BundleError

_ROOT = Path("/")


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that this process could take without swapping: ``MemAvailable``, or less if a control group allows less.

    ``root``: where ``/proc`` and the control groups are.
    """
    return min([meminfo(root)["MemAvailable"], *_rooms_in_cgroups(root)])


def total_memory(root: Path = _ROOT) -> int:
    """Bytes of the machine."""
    return meminfo(root)["MemTotal"]


def meminfo(root: Path = _ROOT) -> dict[str, int]:
    """``/proc/meminfo`` in bytes."""
    lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}


_CGROUP_FILES = {
    "cgroup2": ("memory.max", "memory.current", ("inactive_file", "active_file", "slab_reclaimable")),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
}
"""By the type of the mount: the limit, what is in use, and the lines of memory.stat that the kernel can take back."""


def _rooms_in_cgroups(root: Path) -> Iterator[int]:
    """What each control group with a limit of memory that this process is in has left."""
    for kind, folder in _memory_cgroups(root):
        limit_file, usage_file, reclaimable = _CGROUP_FILES[kind]
        try:
            limit, usage = (folder / limit_file).read_text(), (folder / usage_file).read_text()
            lines = (folder / "memory.stat").read_text().splitlines()
        except OSError:  # the root of a hierarchy has no limit
            continue
        if limit.strip() == "max":
            continue
        stat = {name: int(value) for name, value in map(str.split, lines)}
        yield max(0, int(limit) - int(usage) + sum(stat.get(name, 0) for name in reclaimable))


def _memory_cgroups(root: Path) -> Iterator[tuple[str, Path]]:
    """The control groups that count this process's memory, the innermost first, and which version they are of."""
    try:
        mounts = [line.split() for line in (root / "proc/mounts").read_text().splitlines()]
        memberships = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
    except OSError:  # a kernel without control groups
        return
    for _, mount, kind, options, *_ in mounts:
        if kind not in _CGROUP_FILES or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        top = root / mount.lstrip("/")
        for _, controllers, path in memberships:
            if ("memory" in controllers.split(",")) if kind == "cgroup" else not controllers:
                own = top / path.lstrip("/")
                # In a container the group may be mounted as the top, without the path that leads to it outside.
                own = own if own.is_dir() else top
                yield from ((kind, folder) for folder in (own, *own.parents) if folder.is_relative_to(top))


def map_into_gpu(tensor: Tensor, name: str) -> Tensor:
    """Pin the memory of ``tensor`` and map it into the GPUs' addresses, at its own address, for as long as it lives.

    Torch's own pinned memory comes in powers of two: a table of 48 GiB would take 64. `BundleError` naming the weight
    ``name`` if the memory cannot be pinned.
    """
    runtime: Any = torch.cuda.cudart()
    address, size = tensor.data_ptr(), tensor.nbytes
    if size:
        status = runtime.cudaHostRegister(address, size, 0)
        if int(status) != 0:
            raise BundleError(
                f"cannot pin {size / 2**30:,.1f} GiB of the host's memory for the weight {name}: "
                f"{runtime.cudaGetErrorString(status)}; raise the limit of locked memory (ulimit -l), or build with "
                "--ple-residency disk"
            )
        weakref.finalize(tensor, runtime.cudaHostUnregister, address)
    return tensor
