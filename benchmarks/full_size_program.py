"""The program of a config in a precision, without a checkpoint, and its compiled kernels."""

from __future__ import annotations

from pathlib import Path

from qwen4exp_trt.builder.compile import ExportOptions, transform_config
from qwen4exp_trt.builder.convert import num_table_scales
from qwen4exp_trt.builder.kernels import kernels_of
from qwen4exp_trt.builder.policy import choose_weight_formats, is_table
from qwen4exp_trt.builder.weight_bytes import Component, component_of
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.weights import expected_weights
from qwen4exp_trt.passes.pipeline import Quantization
from qwen4exp_trt.plugins.compile import load_cubins
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.program_text import save_program
from qwen4exp_trt.runtime.weight_formats import WeightFormat


def choose_formats(config: ModelConfig, precision: str, ple: str) -> Quantization:
    """The formats of a checkpoint with routed experts in NVFP4, an FP8 n-gram table, and all else in BF16."""
    shapes = expected_weights(config)
    formats = {Component.EXPERTS: WeightFormat.NVFP4, Component.NGRAM_TABLE: WeightFormat.FP8}
    stored = {name: (formats.get(component_of(name), WeightFormat.FLOAT),) for name in shapes}
    choices = choose_weight_formats(config, stored, precision, ple)
    return Quantization(
        {choice.name: choice.format for choice in choices if choice.format is not WeightFormat.FLOAT},
        {choice.name: num_table_scales(shapes[choice.name][0]) for choice in choices if is_table(choice.name)},
    )


def make_program(
    config_file: Path, precision: str, ple: str, limits: EngineLimits, folder: Path, arch: str, num_sms: int
) -> int:
    """Write the BF16 program into ``folder``, that of the config's draft head into ``draft_head`` there, if it has one,
    and compile their kernels into the cache; returns how many there are."""
    config, count = ModelConfig.from_file(config_file), 0
    for is_draft in (False, True) if config.has_draft_head else (False,):
        options = ExportOptions("bfloat16", "auto", limits.block_size, is_draft=is_draft)
        program, _ = transform_config(config, options, choose_formats(config, precision, ple))
        place = folder / "draft_head" if is_draft else folder
        place.mkdir()
        save_program(program, place)
        kernels = kernels_of(program, limits, num_sms)
        load_cubins(kernels, arch)
        count += len(kernels)
    return count
