"""The CUDA kernels that a program needs, found by asking the launchers; compiled, they go into the bundle."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import product

import torch

from qwen4exp_trt.builder.op_calls import OpCall, distinct_calls
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.plugins.compile import capability_of, cubin_key, load_cubins, supported_architectures
from qwen4exp_trt.plugins.kernels import MIN_CAPABILITY, Kernel
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.own_linears import MOST_TOKENS, with_own_linears
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.sampler import SAMPLING_INPUTS
from qwen4exp_trt.runtime.target_devices import DEVICES
from qwen4exp_trt.runtime.weights import dtype_from_name

_SMALL_TOKENS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64)
"""Launchers may choose another kernel at each of the smallest sizes; from there on at powers of two."""
_SM_COUNTS = (*(device.num_sms for device in DEVICES.values()), 132)
"""Multiprocessors of the GPUs whose kernels a target gets of which nothing is known: the known ones, and an H200."""


def kernels_of(
    program: Program, limits: EngineLimits, num_sms: int, capability: tuple[int, int] = MIN_CAPABILITY
) -> list[Kernel]:
    """Every kernel that a step within ``limits`` may launch on a GPU with ``num_sms`` multiprocessors, each once."""
    found: dict[Kernel, None] = {}
    calls = [*distinct_calls(with_own_linears(program)), *_sampling_calls(program)]
    for dims in _step_dims(limits):
        for call in calls:
            if call.spec.name == "linear" and dims["T"] > MOST_TOKENS:
                continue
            if dims["max_blocks"] < limits.blocks_per_seq and not call.uses("max_blocks"):
                continue
            found |= dict.fromkeys(launch.kernel for launch in call.plan(dims, num_sms, capability).launches)
    return list(found)


def compile_kernels(program: Program, limits: EngineLimits, targets: Sequence[str]) -> dict[str, bytes]:
    """The kernels of a step within ``limits`` for GPU architectures such as ``sm121``, by file name.

    The runtime finds a kernel by its name, which is a hash of its content, and compiles those that are missing:
    launchers choose some by the number of multiprocessors, which not all GPUs of an architecture share.
    """
    files: dict[str, bytes] = {}
    for target in targets:
        arch, device = architecture_of_target(target), DEVICES.get(target)
        counts = _SM_COUNTS if device is None else (device.num_sms,)
        capability = capability_of(arch)
        needed = list(
            {kernel: None for num_sms in counts for kernel in kernels_of(program, limits, num_sms, capability)}
        )
        codes = load_cubins(needed, arch)
        files |= {f"{cubin_key(kernel, arch)}.cubin": code for kernel, code in zip(needed, codes, strict=True)}
    return files


def architecture_of_target(target: str) -> str:
    """The compiler's name of the GPU architecture ``target`` (``sm121``); `BuildError` if it knows none."""
    choices = {re.sub("_|a$", "", arch): arch for arch in supported_architectures()}
    if target not in choices:
        raise BuildError(
            f"CUDA kernels cannot be compiled for {target!r}; NVRTC here compiles them for {', '.join(choices)}"
        )
    return choices[target]


def _step_dims(limits: EngineLimits) -> Iterator[dict[str, int]]:
    """Sizes of steps, small and large ones."""
    tokens = {*_SMALL_TOKENS, *(2**n for n in range(7, 17)), limits.max_step_tokens}
    sequences = {1, 2, 3, 4, 8, 16, 32, 64, limits.max_batch_size}
    # The block table is as wide as the longest sequence of a step, which is all that launchers know of lengths.
    pages = {min(2**n, limits.blocks_per_seq) for n in range(limits.blocks_per_seq.bit_length() + 1)}
    for T, B, max_blocks in product(sorted(tokens), sorted(sequences), sorted(pages)):
        if B <= T <= limits.max_step_tokens and limits.max_batch_size >= B:
            yield {
                "T": T,
                "B": B,
                "B_plus_1": B + 1,
                "L": B,
                "max_blocks": max_blocks,
                "num_blocks": limits.max_num_blocks,
                "num_slots": limits.num_slots,
            }


def _sampling_calls(program: Program) -> Iterator[OpCall]:
    """What samples from the logits: as the program gives them, and as float32, in which penalties are applied."""
    for logits in (spec for spec in program.outputs if spec.name == "logits"):
        shapes = {spec.name: list(spec.shape) for spec in SAMPLING_INPUTS}
        shapes |= {name: list(logits.shape) for name in ("logits", "raw_logits")}
        others = {spec.name: dtype_from_name(spec.dtype) for spec in SAMPLING_INPUTS}
        for dtype in {dtype_from_name(logits.dtype), torch.float32}:
            dtypes = dict.fromkeys(("logits", "raw_logits"), dtype) | others
            yield OpCall(all_specs()["sample_tokens"], shapes, dtypes, {"vocab_limit": 0})
