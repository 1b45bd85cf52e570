"""Executes the plans of launchers on the CPU: kernels compiled by g++ over `emulator/cuda_emulator.h`."""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qwen4exp_trt.plugins.compile import SOURCES, write_atomically
from qwen4exp_trt.plugins.kernels import (
    F32,
    MIN_CAPABILITY,
    NUM_SEMAPHORES,
    Kernel,
    Plan,
    ScratchRef,
    SemaphoreRef,
    TensorRef,
    define_flags,
)
from qwen4exp_trt.plugins.spec import OpSpec, element_shape

EMULATOR = Path(__file__).parent / "emulator" / "cuda_emulator.h"
BUILD = Path(__file__).parents[2] / "build" / "emulator"
NUM_SMS = 4
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-w", "-ffp-contract=off", "-DQ4E_EMULATE", "-fno-gnu-unique"]
SHARED_HEADER = SOURCES / "include" / "q4e.cuh"
"""Every kernel includes it, and it depends on no macro of theirs."""


def run_emulated(
    spec: OpSpec,
    args: list[Any],
    reverse: bool = False,
    num_sms: int = NUM_SMS,
    capability: tuple[int, int] = MIN_CAPABILITY,
) -> tuple[Tensor, ...]:
    """One call of ``spec`` by its kernels on CPU tensors; states are updated in place. Outputs start as NaN."""
    tensors, attrs = spec.split_args(args)
    bound = spec.check_operands(tensors, attrs)
    shapes = {name: element_shape(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    plan = spec.plan(shapes, dtypes, attrs, num_sms, capability)
    outputs = {
        arg.name: poisoned(shape, dtype)
        for arg, shape, dtype in zip(
            spec.outputs,
            spec.output_shapes(bound),
            spec.output_dtypes([dtypes[arg.name] for arg in spec.inputs], attrs),
            strict=True,
        )
    }
    pointers = {name: _pointer(name, tensor) for name, tensor in (tensors | outputs).items()}
    execute_emulated(plan, pointers, reverse)
    return tuple(outputs.values())


def poisoned(shape: list[int], dtype: torch.dtype) -> Tensor:
    """NaN, or an absurd integer: what a kernel does not write shows."""
    return torch.full(shape, torch.nan if dtype.is_floating_point else -(2**30), dtype=dtype)


def _pointer(name: str, tensor: Tensor) -> int:
    assert tensor.is_contiguous(), name
    return tensor.data_ptr()


def execute_emulated(
    plan: Plan,
    pointers: Mapping[str, int],
    reverse: bool = False,
    scratch: int | None = None,
    semaphores: int | None = None,
) -> None:
    """Run ``plan`` on CPU memory by name. AssertionError if a kernel leaves a semaphore or never ends.

    ``scratch`` and ``semaphores`` are addresses as `plugins.execute.execute` has them; None for memory of its own.
    """
    own_scratch = torch.full((plan.scratch_bytes + 1,), 255, dtype=torch.uint8)
    own_semaphores = torch.zeros(NUM_SEMAPHORES, dtype=torch.int32)
    scratch_address = own_scratch.data_ptr() if scratch is None else scratch
    counters = own_semaphores.data_ptr() if semaphores is None else semaphores
    left_behind = (ctypes.c_int32 * NUM_SEMAPHORES).from_address(counters)

    def cell(arg: Any) -> Any:
        if isinstance(arg, F32):
            return ctypes.c_float(arg.value)
        if isinstance(arg, int):
            return ctypes.c_int32(arg)
        if isinstance(arg, TensorRef):
            return ctypes.c_void_p(pointers[arg.name])
        base = scratch_address + arg.offset if isinstance(arg, ScratchRef) else counters + 4 * arg.index
        assert isinstance(arg, ScratchRef | SemaphoreRef), arg
        return ctypes.c_void_p(base)

    for launch in plan.launches:
        cells = [cell(arg) for arg in launch.args]
        addresses = (ctypes.c_void_p * len(cells))(*[ctypes.addressof(c) for c in cells])
        result = _compiled(launch.kernel)(*launch.grid, launch.threads, launch.shared_bytes, addresses, int(reverse))
        assert result == 0, f"{launch.kernel.entry}: threads of a block wait for each other for ever"
        assert not any(left_behind), f"{launch.kernel.entry} left a semaphore behind"


@cache
def _compiled(kernel: Kernel) -> Any:
    source = "\n".join(
        [
            *(f"#define {flag.replace('=', ' ', 1)}" for flag in define_flags(kernel.defines)),
            f'#include "{SOURCES / kernel.source}"',
            f"static void body(void* args) {{ emulator::invoke({kernel.entry}, static_cast<void**>(args)); }}",
            'extern "C" int run(unsigned x, unsigned y, unsigned z, int threads, size_t shared, void** args,',
            "                   int reverse)",
            "{ return emulator::launch(body, args, {x, y, z}, threads, shared, reverse); }",
        ]
    )
    digest = _digest(source, *(path.read_text() for path in (SOURCES / kernel.source, *_headers())))
    library = BUILD / f"{kernel.entry}-{digest}.so"
    if not library.is_file():
        _compile(source, library, ["-shared", "-include", str(_compiled_headers()), "-x", "c++"])
    run = ctypes.CDLL(str(library)).run
    run.argtypes = [ctypes.c_uint] * 3 + [ctypes.c_int, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int]
    return run


@cache
def _compiled_headers() -> Path:
    """A header that includes what all kernels do; the compiler finds it compiled beside it, a third of its work."""
    source = f'#include "{EMULATOR}"\n#include "{SHARED_HEADER}"\n'
    header = BUILD / f"headers-{_digest(source, *(path.read_text() for path in _headers()))}.h"
    compiled = header.with_name(f"{header.name}.gch")
    if not compiled.is_file():
        write_atomically(header, source.encode())
        _compile(source, compiled, ["-x", "c++-header"])
    return header


def _compile(source: str, result: Path, options: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "source.cpp", Path(folder) / "result"
        path.write_text(source)
        command = ["g++", *FLAGS, f"-I{SOURCES / 'include'}", f"-I{SOURCES}", *options, str(path), "-o", str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{result.stem} does not compile for the emulator:\n{done.stderr[:4000]}"
        write_atomically(result, out.read_bytes())


@cache
def _headers() -> list[Path]:
    return [EMULATOR, *sorted(SOURCES.rglob("*.cuh"))]


def _digest(*texts: str) -> str:
    return hashlib.sha256("\0".join([*texts, *FLAGS]).encode()).hexdigest()[:24]
