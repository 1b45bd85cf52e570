"""Executes plans on a GPU through ``cuda.core``: the path of torch's ops and of the TensorRT plugins to a kernel."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.compile import architecture, load_cubin
from qwen4exp_trt.plugins.kernels import F32, MOST_PLANS, Kernel, Launch, Plan, ScratchRef, TensorRef

_cubin_folders: list[Path] = []
_shared_limits: dict[tuple[Kernel, int], int] = {}


def use_cubins(folder: Path) -> None:
    """Look for compiled kernels in ``folder`` first. Their names are hashes of their content, so order is no matter."""
    if folder not in _cubin_folders:
        _cubin_folders.append(folder)


def num_multiprocessors(device_index: int) -> int:
    """Multiprocessors of a GPU."""
    return _device(device_index).properties.multiprocessor_count


@cache
def compute_capability(device_index: int) -> tuple[int, int]:
    """Of a GPU."""
    found = _device(device_index).compute_capability
    return found.major, found.minor


def execute(
    plan: Plan, pointers: Mapping[str, int], scratch: int, semaphores: int, device_index: int, stream: int
) -> None:
    """Enqueue the launches of ``plan`` on ``stream`` (a handle); nothing is allocated and nothing is waited for.

    ``pointers``: the device address of every operand and output. ``scratch`` addresses ``plan.scratch_bytes``,
    ``semaphores`` as many zeroed uint32 as `NUM_SEMAPHORES`.
    """
    launch, on = _core().launch, _stream(stream)
    for kernel, config, fixed in _prepared_launches(plan, device_index):
        args = [_address(arg, pointers, scratch, semaphores) if value is None else value for arg, value in fixed]
        launch(on, config, kernel, *args)


def _address(arg: Any, pointers: Mapping[str, int], scratch: int, semaphores: int) -> int:
    if isinstance(arg, TensorRef):
        return pointers[arg.name]
    return scratch + arg.offset if isinstance(arg, ScratchRef) else semaphores + 4 * arg.index


@lru_cache(MOST_PLANS)
def _prepared_launches(plan: Plan, device_index: int) -> list[tuple[Any, Any, list[tuple[Any, Any]]]]:
    return [_prepared(launch, device_index) for launch in plan.launches]


def _prepared(launch: Launch, device_index: int) -> tuple[Any, Any, list[tuple[Any, Any]]]:
    """The loaded kernel, its configuration, and each argument with its value, None for an address."""
    kernel = _load(launch.kernel, device_index)
    if launch.shared_bytes > 0:
        _allow_shared_memory(kernel, launch, device_index)
    config = _core().LaunchConfig(
        grid=launch.grid,
        block=launch.threads,
        shmem_size=launch.shared_bytes,
        programmatic_stream_serialization=launch.overlaps and compute_capability(device_index) >= (9, 0),
    )
    return kernel, config, [(arg, _value(arg)) for arg in launch.args]


def _value(arg: Any) -> Any:
    if isinstance(arg, F32):
        return np.float32(arg.value)
    return np.int32(arg) if isinstance(arg, int) else None


@cache
def _load(kernel: Kernel, device_index: int) -> Any:
    code = load_cubin(kernel, architecture(compute_capability(device_index)), tuple(_cubin_folders))
    return _core().ObjectCode.from_cubin(code, name=kernel.source).get_kernel(kernel.entry)


def _allow_shared_memory(kernel: Any, launch: Launch, device_index: int) -> None:
    """Raise the kernel's limit of dynamic shared memory to what the most demanding launch so far needs."""
    key = (launch.kernel, device_index)
    if launch.shared_bytes <= _shared_limits.get(key, 0):
        return
    driver: Any = importlib.import_module("cuda.bindings.driver")
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (result,) = driver.cuKernelSetAttribute(attribute, launch.shared_bytes, kernel.handle, device_index)
    if result != driver.CUresult.CUDA_SUCCESS:
        raise PluginError(f"{launch.kernel.entry} needs {launch.shared_bytes} bytes of shared memory: {result.name}")
    _shared_limits[key] = launch.shared_bytes


@cache
def _device(index: int) -> Any:
    device = _core().Device(index)
    device.set_current()
    return device


@cache
def _stream(handle: int) -> Any:
    return _core().Stream.from_handle(handle)


@cache
def _core() -> Any:
    try:
        return importlib.import_module("cuda.core")
    except ImportError as error:
        raise PluginError(
            "running on a GPU needs cuda-python, which is not installed; run: pip install 'qwen4exp-trt[cuda]'"
        ) from error
