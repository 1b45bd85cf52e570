"""The GPU that a bundle runs on: found and checked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.plugins.compile import architecture
from qwen4exp_trt.plugins.execute import num_multiprocessors
from qwen4exp_trt.runtime.memory_plan import MemoryPlan

_ENGINE_ON_CPU = "an engine executes on a GPU, only the backend 'eager' on the CPU"


def device_from_name(name: str, for_engine: bool = False) -> torch.device:
    """``cpu``, ``cuda`` or ``cuda:N`` as a device that can execute; `BundleError` for any other or one that is absent,
    or ``for_engine`` for the CPU.

    `PluginError` for a GPU that the kernels do not run on, or without cuda-python.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise BundleError(f"device {name!r} cannot execute in this version; use 'cpu', 'cuda' or 'cuda:N'")
    if device.type == "cpu":
        if for_engine:
            raise BundleError(f"device 'cpu': {_ENGINE_ON_CPU}; use device 'cuda'")
        return torch.device("cpu")
    if not torch.cuda.is_available():
        build = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no CUDA GPU here"
        instead = _ENGINE_ON_CPU if for_engine else "use device 'cpu'"
        raise BundleError(f"device {name!r}: {build}; {instead}")
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        raise BundleError(f"device {name!r}: this machine has {torch.cuda.device_count()} GPUs, cuda:0 and on")
    architecture(torch.cuda.get_device_capability(index))
    num_multiprocessors(index)
    return torch.device("cuda", index)


def limit_allocations(plan: MemoryPlan, device: torch.device) -> None:
    """Let torch take no more of memory that a GPU shares with the host than was found usable for ``plan``.

    What exceeds it then fails alone (`torch.OutOfMemoryError`, behind which torch gives back what it only caches).
    """
    if device.type != "cuda" or not plan.is_unified:
        return
    on_host = sum(use.num_bytes for use in plan.uses if use.is_on_host)
    total = torch.cuda.get_device_properties(device).total_memory
    allowed = torch.cuda.memory_reserved(device) + plan.device.usable - on_host
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)


def is_lost(device: torch.device) -> bool:
    """Whether a kernel has failed in a way (an illegal address, a hardware error) that ends all work of the process on
    this GPU. Waits for what it has enqueued."""
    if device.type != "cuda":
        return False
    try:
        torch.cuda.synchronize(device)
    except RuntimeError:
        return True
    return False


@contextmanager
def exact_matmuls() -> Iterator[None]:
    """Products of float32 without TF32, and sums of BF16 products in float32, whatever the process has chosen."""
    matmul = torch.backends.cuda.matmul
    chosen = matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction
    matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction = "ieee", False
    try:
        yield
    finally:
        matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction = chosen
