"""The kernels of the released model compile for GB10 within its limits."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from released_model import CONVERTED_TO_NVFP4, OFFICIAL_FP8, PUBLISHED_NVFP4, released_config

from qwen4exp_trt.builder.compile import ExportOptions, transform_config
from qwen4exp_trt.builder.kernels import kernels_of
from qwen4exp_trt.passes.pipeline import Quantization
from qwen4exp_trt.plugins.compile import Cubin, compile_kernel
from qwen4exp_trt.plugins.kernels import Kernel
from qwen4exp_trt.plugins.registry import plugin_specs
from qwen4exp_trt.runtime.limits import EngineLimits

GB10, GB10_SMS = "sm_121a", 48
LIMITS = EngineLimits(max_batch_size=64, max_seq_len=262144, prefill_chunk=2048, block_size=64)
TARGETS = [GB10, pytest.param("sm_90", marks=pytest.mark.slow), pytest.param("sm_80", marks=pytest.mark.slow)]


@cache
def released_kernels() -> dict[Kernel, None]:
    """Of one layer of each kind, at released sizes, in every format that weights are published in or converted to."""
    config = replace(released_config(), num_hidden_layers=4, layer_types=released_config().layer_types[:4])
    found: dict[Kernel, None] = {}
    for formats in ({}, OFFICIAL_FP8, PUBLISHED_NVFP4, CONVERTED_TO_NVFP4):
        ours = {name: fmt for name, fmt in formats.items() if not name.startswith("layers.") or int(name[7]) < 4}
        ours = {name: fmt for name, fmt in ours.items() if not name.startswith("layers.") or name[8] == "."}
        for kv_cache_dtype in ("auto", "float8_e4m3fn"):
            options = ExportOptions("bfloat16", kv_cache_dtype, LIMITS.block_size)
            program, _ = transform_config(config, options, Quantization(ours))
            found |= dict.fromkeys(kernels_of(program, LIMITS, GB10_SMS))
    return found


@cache
def compiled(arch: str) -> dict[Kernel, Cubin]:
    return {kernel: compile_kernel(kernel, arch) for kernel in released_kernels()}


@pytest.mark.parametrize("arch", TARGETS)
def test_kernels_spill_nothing(arch: str) -> None:
    wrong = [f"{k.entry}{k.defines}: {c}" for k, c in compiled(arch).items() if c.spill_bytes or c.stack_bytes]
    assert not wrong, "\n".join(wrong)


def test_every_plugin_has_kernels() -> None:
    assert not [name for name, spec in plugin_specs().items() if spec.launches is None]
