"""The kernels of the released model compile for GB10 within its limits."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
from released_model import CONVERTED_TO_NVFP4, OFFICIAL_FP8, PUBLISHED_NVFP4, released_config

from qwen4exp_trt.builder import compile as builder_compile
from qwen4exp_trt.builder import kernels as kernels_module
from qwen4exp_trt.builder.compile import ExportOptions, transform_config
from qwen4exp_trt.builder.kernels import architecture_of_target, compile_kernels, kernels_of
from qwen4exp_trt.builder.op_calls import distinct_calls
from qwen4exp_trt.errors import BuildError, PluginError
from qwen4exp_trt.frontend.export import export_program
from qwen4exp_trt.passes.pipeline import Quantization
from qwen4exp_trt.plugins import compile as compile_module
from qwen4exp_trt.plugins.compile import compile_kernel, cubin_key, load_cubin
from qwen4exp_trt.plugins.kernels import Kernel
from qwen4exp_trt.plugins.registry import plugin_specs
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.target_devices import DEVICES

GB10 = "sm_121a"
LIMITS = EngineLimits(max_batch_size=64, max_seq_len=262144, prefill_chunk=2048, block_size=64)
PARTS = 12
"""Tests over which the kernels are spread: there are many."""


@cache
def released_programs() -> list[Program]:
    """One layer of each kind, at released sizes, in every format that weights are published in or converted to, and
    the draft head.

    Traced once for each format of the cache.
    """
    config = replace(released_config(), num_hidden_layers=4, layer_types=released_config().layer_types[:4])
    programs, export_once = [], cache(export_program)
    for formats in ({}, OFFICIAL_FP8, PUBLISHED_NVFP4, CONVERTED_TO_NVFP4):
        ours = {name: fmt for name, fmt in formats.items() if not name.startswith("layers.") or int(name[7]) < 4}
        ours = {name: fmt for name, fmt in ours.items() if not name.startswith("layers.") or name[8] == "."}
        for kv_cache_dtype in ("auto", "float8_e4m3fn"):
            options = ExportOptions("bfloat16", kv_cache_dtype, LIMITS.block_size)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(builder_compile, "export_program", export_once)
                programs.append(transform_config(config, options, Quantization(ours))[0])
    draft = ExportOptions("bfloat16", "auto", LIMITS.block_size, is_draft=True)
    programs.append(transform_config(released_config(has_draft_head=True), draft, Quantization())[0])
    return programs


@cache
def released_kernels(num_sms: int) -> dict[Kernel, None]:
    return {kernel: None for program in released_programs() for kernel in kernels_of(program, LIMITS, num_sms)}


def assert_no_spills(kernels: Iterable[Kernel], arch: str) -> None:
    compiled = {kernel: compile_kernel(kernel, arch) for kernel in kernels}
    wrong = [f"{k.entry}{k.defines}: {c.log}" for k, c in compiled.items() if c.spill_bytes or c.stack_bytes]
    assert not wrong, "\n".join(wrong)


def test_a_kernel_of_each_entry_spills_nothing() -> None:
    """The last of each that is not for many tokens; those, of which some compile for seconds, and all types and sizes
    are a slow test."""
    kernels = released_kernels(DEVICES["sm121"].num_sms)
    of_entries = {(kernel.source, kernel.entry): kernel for kernel in kernels if "many" not in kernel.source}
    assert_no_spills(of_entries.values(), GB10)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("arch", [GB10, "sm_90", "sm_80"])
def test_kernels_spill_nothing(arch: str, part: int) -> None:
    assert_no_spills([*released_kernels(DEVICES["sm121"].num_sms)][part::PARTS], arch)


@pytest.mark.parametrize("num_sms", [48, pytest.param(132, marks=pytest.mark.slow)])
def test_steps_of_short_sequences_need_no_other_kernels(num_sms: int) -> None:
    """The block table of a step is as wide as its longest sequence; some launchers choose a kernel by that."""
    program, known = released_programs()[0], released_kernels(num_sms)
    steps = (1, 1, 1), (8, 2, 8), (300, 5, 5), (600, 1, 1)
    for num_pages, (T, B, L) in product((1, 3, 32, 33, 150, 257, 1000), steps):
        dims = {"T": T, "B": B, "B_plus_1": B + 1, "L": L, "max_blocks": num_pages}
        dims |= {"num_blocks": LIMITS.max_num_blocks, "num_slots": LIMITS.num_slots}
        for call in distinct_calls(program):
            missing = [launch.kernel for launch in call.plan(dims, num_sms).launches if launch.kernel not in known]
            assert not missing, (call.spec.name, dims)


def test_every_plugin_has_kernels() -> None:
    assert not [name for name, spec in plugin_specs().items() if spec.launches is None]


def test_compiled_kernels_are_found_by_their_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = {num_sms: [*released_kernels(num_sms)][:2] for num_sms in (48, 132)}
    monkeypatch.setattr(kernels_module, "kernels_of", lambda program, limits, num_sms, capability: few[num_sms])
    program = released_programs()[0]
    files = compile_kernels(program, LIMITS, ["sm121", "sm90"])
    wanted = {f"{cubin_key(kernel, arch)}.cubin" for kernel in few[48] for arch in (GB10, "sm_90")}
    wanted |= {f"{cubin_key(kernel, 'sm_90')}.cubin" for kernel in few[132]}
    assert set(files) == wanted, "those of a GB10, and for another target those of an H200 as well"
    for name, code in files.items():
        (tmp_path / name).write_bytes(code)
    monkeypatch.setattr(compile_module, "compile_kernel", lambda *args: pytest.fail("it is in the folder"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    assert load_cubin(few[48][0], GB10, [tmp_path]) == files[f"{cubin_key(few[48][0], GB10)}.cubin"]


@pytest.mark.parametrize("target", ["sm999", "sm75", "sm_90", "gb10", ""])
def test_targets_that_the_compiler_does_not_know(target: str) -> None:
    with pytest.raises(BuildError, match=r"cannot be compiled for '\w*'; NVRTC here compiles them for sm80, .*, sm121"):
        architecture_of_target(target)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.core", None)
    compile_module._import_cuda_core.cache_clear()
    with pytest.raises(
        PluginError, match=r"need cuda-python, which is not installed; run: pip install 'qwen4exp-trt\[cuda\]'"
    ):
        architecture_of_target("sm121")
