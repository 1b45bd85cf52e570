"""Config in, program and ONNX out: the part of a build that needs neither weights nor TensorRT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx

from qwen4exp_trt.builder.lower import lower_program
from qwen4exp_trt.builder.plugin_inputs import plugin_inputs
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.export import export_draft_program, export_program
from qwen4exp_trt.passes.base import PassManager, PassResult
from qwen4exp_trt.passes.pipeline import Quantization, make_pipeline
from qwen4exp_trt.passes.verification import Verifier
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.specs import PleResidency, TensorSpec

Stage = Callable[[str], None]
"""Called with the name of each stage as it begins."""


@dataclass(frozen=True)
class ExportOptions:
    """What of a build's options the trace depends on."""

    activation_dtype: str
    kv_cache_dtype: str
    """``auto`` for the activation dtype, or ``float8_e4m3fn``."""
    block_size: int
    ple_residency: str = PleResidency.DEVICE
    """Of the n-gram table: what is read from disk is an input of the program."""
    is_draft: bool = False
    """Whether it is the program of the draft head, or the model's."""


@dataclass(frozen=True)
class CompiledProgram:
    """The program after all passes, its ONNX form, and what the passes did."""

    program: Program
    onnx_model: onnx.ModelProto
    passes: list[PassResult]
    debug_outputs: tuple[TensorSpec, ...] = ()
    """Plugin inputs that are outputs of the ONNX form as well."""


def transform_config(
    config: ModelConfig,
    options: ExportOptions,
    quantization: Quantization,
    stage: Stage = lambda name: None,
    verifier: Verifier | None = None,
) -> tuple[Program, list[PassResult]]:
    """Trace and transform. ``verifier`` executes the program before and after each pass."""
    name = "draft head " if options.is_draft else ""
    stage(f"{name}export")
    export = export_draft_program if options.is_draft else export_program
    program = export(config, options.activation_dtype, options.block_size, options.kv_cache_dtype)
    stage(f"{name}passes")
    return PassManager(make_pipeline(quantization, options.ple_residency), verifier).run(program)


def compile_program(
    config: ModelConfig,
    options: ExportOptions,
    quantization: Quantization,
    stage: Stage = lambda name: None,
    verifier: Verifier | None = None,
    mark_inputs_of: Sequence[str] = (),
) -> CompiledProgram:
    """`transform_config`, and lower. ``mark_inputs_of``: patterns of plugins whose inputs become outputs."""
    program, results = transform_config(config, options, quantization, stage, verifier)
    stage("draft head lower" if options.is_draft else "lower")
    marked = plugin_inputs(program, mark_inputs_of)
    return CompiledProgram(program, lower_program(program, marked), results, marked)
