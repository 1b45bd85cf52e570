"""Checkpoint in, bundle out."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx

from qwen4exp_trt.builder.bundle import check_output, hash_files, staged_folder
from qwen4exp_trt.builder.calibrate import CalibrationText, calibrate
from qwen4exp_trt.builder.compile import CompiledProgram, ExportOptions, compile_program, transform_config
from qwen4exp_trt.builder.convert import ConvertedFolder
from qwen4exp_trt.builder.draft_head import DraftChoice, choose_draft_head
from qwen4exp_trt.builder.engine import EngineBuild, build_engine, check_target
from qwen4exp_trt.builder.kernels import architecture_of_target, compile_kernels
from qwen4exp_trt.builder.memory import check_memory
from qwen4exp_trt.builder.options import BuildOptions
from qwen4exp_trt.builder.plan import Plan
from qwen4exp_trt.builder.planning import plan_bundle, weight_plan_for
from qwen4exp_trt.builder.profiles import Profile, optimization_profiles
from qwen4exp_trt.builder.reporter import Reporter
from qwen4exp_trt.builder.text_files import TextFiles
from qwen4exp_trt.builder.verify import check_verify_memory, make_verifier, verify_onnx
from qwen4exp_trt.builder.weight_plan import WeightPlan
from qwen4exp_trt.builder.weight_source import WeightSource, open_weight_source
from qwen4exp_trt.builder.weight_table import WeightTableRow, weight_table
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.weights import resolve_weights
from qwen4exp_trt.passes.patterns import ngram_table_weights
from qwen4exp_trt.passes.pipeline import Quantization
from qwen4exp_trt.passes.verification import Verifier
from qwen4exp_trt.plugins.registry import op_versions
from qwen4exp_trt.runtime.calibration import Calibration
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.manifest import (
    DRAFT_DIR,
    ENGINE_FILE,
    KERNELS_DIR,
    LAYERS_FILE,
    ONNX_FILE,
    PROGRAM_DIR,
    TOKEN_IDS_FILE,
    CheckpointRef,
    DraftHead,
    Manifest,
)
from qwen4exp_trt.runtime.materialize import load_weights
from qwen4exp_trt.runtime.ngram_rows import NgramRows
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.program_text import save_program
from qwen4exp_trt.runtime.specs import PleResidency
from qwen4exp_trt.runtime.tensorrt.engine_checks import engine_label
from qwen4exp_trt.runtime.tensorrt.module import load_trt
from qwen4exp_trt.runtime.tokenizer import Tokenizer

_TOOLS = ("torch", "onnx")


@dataclass(frozen=True)
class BuildReport:
    """What a build made."""

    manifest: Manifest
    program: Program
    plan: Plan
    """With the activation memory of the engine, if TensorRT told it."""
    set_aside: dict[str, int]
    """How many checkpoint tensors the text model does not use, by what they belong to."""
    onnx_errors: dict[str, float]
    """Largest relative error of the executed ONNX by activation dtype; empty unless verified."""
    draft: PartReport | None
    """Of the draft head; None without one."""
    why_no_draft: str
    """Why there is no draft head; empty if there is one."""


@dataclass(frozen=True)
class PartReport:
    """What a build made of the draft head."""

    program: Program
    onnx_errors: dict[str, float]


@dataclass(frozen=True)
class _Job:
    """What a build knows before it compiles."""

    options: BuildOptions
    config: ModelConfig
    limits: EngineLimits
    text_files: TextFiles
    trt: ModuleType | None
    weight_plan: WeightPlan
    weight_table: list[WeightTableRow]
    source: WeightSource | None
    """None without weights."""
    calibration_text: CalibrationText | None
    draft: DraftChoice
    reporter: Reporter

    @property
    def quantization(self) -> Quantization:
        return Quantization(self.weight_plan.formats, self.weight_plan.table_scales)


def build_bundle(options: BuildOptions, reporter: Reporter | None = None) -> BuildReport:
    """Build and write a bundle; ``reporter`` is told what happens. Nothing stays behind when a step fails, but the
    finished files of converted weights, which the next build finds."""
    reporter = reporter or Reporter()
    options.check()
    check_output(options.output)
    reporter.stage("config")
    config = options.read_config()
    if options.verify:
        check_verify_memory(config)
    limits = options.limits_for(config)
    text_files = TextFiles.from_dir(options.text_folder, config)
    calibration_text = _read_calibration_text(options)
    trt = _load_trt(options)
    for target in options.all_kernel_targets:
        architecture_of_target(target)
    with ExitStack() as stack:
        checkpoint = resolved = None
        if not options.config_only:
            reporter.stage("checkpoint")
            checkpoint = Checkpoint.open(options.checkpoint)
        draft = choose_draft_head(options, config, checkpoint)
        config = draft.config
        if checkpoint is not None:
            resolved = resolve_weights(config, checkpoint, draft.token_ids)
        stored = None if resolved is None else resolved.weights
        reporter.stage("plan")
        weight_plan = weight_plan_for(options, config, stored)
        table = weight_table(config, weight_plan.choices, options.activation_dtype)
        plan = plan_bundle(options, weight_plan)
        reporter.show_plan(plan, table)
        source = None
        if checkpoint is not None:
            folder = ConvertedFolder(options.converted_dir, options.convert_device)
            source = stack.enter_context(open_weight_source(checkpoint, weight_plan, folder, reporter))
        job = _Job(
            *(options, config, limits, text_files, trt, weight_plan, table, source, calibration_text, draft, reporter)
        )
        set_aside = {} if resolved is None else {kind: len(names) for kind, names in resolved.set_aside.items()}
        return _build(job, plan, set_aside)


def _read_calibration_text(options: BuildOptions) -> CalibrationText | None:
    if options.calibration is None:
        return None
    assert options.text_folder is not None
    return CalibrationText.read(options.calibration, Tokenizer.from_dir(options.text_folder))


def _load_trt(options: BuildOptions) -> ModuleType | None:
    """The TensorRT module that can build for the target; None for a bundle without an engine."""
    if not options.has_engine:
        return None
    trt = load_trt(options.backend)
    check_target(trt, options.engine_target)
    return trt


def _build(job: _Job, plan: Plan, set_aside: dict[str, int]) -> BuildReport:
    options, reporter = job.options, job.reporter
    calibration = None if job.calibration_text is None else _calibrate(job, job.calibration_text)
    quantization = job.quantization
    if calibration is not None:
        quantization = replace(quantization, input_scales=calibration.scales)
    parts = [_build_part(job, quantization, is_draft=False)]
    if job.config.has_draft_head:
        parts.append(_build_part(job, job.quantization, is_draft=True))
    sizes = [part.engine.activation_bytes for part in parts if part.engine is not None]
    if sizes and None not in sizes:
        plan = plan.with_activations(max(filter(None, sizes), default=0))  # only one of them runs at a time
    plan = plan.with_debug_outputs(tuple(spec for part in parts for spec in part.compiled.debug_outputs))
    kernels: dict[str, bytes] = {}
    if options.all_kernel_targets:
        reporter.stage("kernels")
        for part in parts:
            kernels |= compile_kernels(part.compiled.program, job.limits, options.all_kernel_targets)
    reporter.stage("write")
    with staged_folder(options.output) as folder:
        for part, path in zip(parts, (folder, folder / DRAFT_DIR), strict=False):
            _write_part(path, part)
        _write_kernels(folder / KERNELS_DIR, kernels)
        if job.draft.token_ids is not None:
            (folder / TOKEN_IDS_FILE).write_text(json.dumps(job.draft.token_ids) + "\n", encoding="utf-8")
        job.text_files.copy_to(folder)
        manifest = _manifest(folder, job, parts, calibration, plan)
        manifest.save(folder)
    draft = PartReport(parts[1].program, parts[1].onnx_errors) if len(parts) > 1 else None
    return BuildReport(manifest, parts[0].program, plan, set_aside, parts[0].onnx_errors, draft, job.draft.why_none)


@dataclass(frozen=True)
class _Part:
    """The model or the draft head, built."""

    compiled: CompiledProgram
    program: Program
    """With recipes over tensors of the files."""
    profiles: dict[str, Profile]
    engine: EngineBuild | None
    onnx_errors: dict[str, float]


def _build_part(job: _Job, quantization: Quantization, is_draft: bool) -> _Part:
    compiled, onnx_errors = _compile(job, replace(job.options.export, is_draft=is_draft), quantization)
    program = compiled.program if job.source is None else job.source.resolve(compiled.program)
    profiles = optimization_profiles(job.limits, (*program.inputs, *program.states))
    engine = None
    if job.trt is not None:
        job.reporter.stage("draft head engine" if is_draft else "engine")
        engine = build_engine(job.trt, compiled.onnx_model, profiles, job.options.engine_target)
    return _Part(compiled, program, profiles, engine, onnx_errors)


def _calibrate(job: _Job, text: CalibrationText) -> Calibration:
    """The scales of the activations, of the program as it is with 16-bit ones."""
    assert job.source is not None
    job.reporter.stage("load")
    program, _ = transform_config(job.config, job.options.export, job.quantization)
    program = job.source.resolve(program)
    needed = sum(spec.tensor.num_bytes({}) for spec in program.weights)
    check_memory(needed, "calibration", "it runs the whole model: calibrate where that fits, or give --ple nvfp4")
    weights = load_weights(program.weights, job.source.reader, progress=job.reporter.progress)
    rows = NgramRows(program.inputs, job.source.reader, num_slots=1)
    job.reporter.stage("calibrate")
    return calibrate(program, weights, rows, job.limits, text, job.reporter.progress)


def _compile(job: _Job, options: ExportOptions, quantization: Quantization) -> tuple[CompiledProgram, dict[str, float]]:
    """Compile; with ``--verify`` execute every pass in float32, and the ONNX in both activation dtypes."""
    stage = job.reporter.stage
    if not job.options.verify:
        marked = job.options.mark_plugin_inputs
        return compile_program(job.config, options, quantization, stage, mark_inputs_of=marked), {}
    assert job.source is not None
    verifier = make_verifier(job.config, options.block_size, job.source.tensor, options.is_draft)
    errors: dict[str, float] = {}

    def compile_verified(export: ExportOptions, pass_verifier: Verifier | None) -> CompiledProgram:
        dtype = export.activation_dtype
        compiled = compile_program(
            *(job.config, export, quantization, lambda name: stage(f"{name} ({dtype})"), pass_verifier),
            mark_inputs_of=job.options.mark_plugin_inputs,
        )
        stage(f"{'draft head ' if options.is_draft else ''}run onnx ({dtype})")
        errors[dtype] = max(errors.get(dtype, 0.0), verify_onnx(compiled.program, compiled.onnx_model, verifier))
        return compiled

    # A cache in FP8 would turn a last bit of difference into a whole step of its keys and values.
    exact = replace(options, activation_dtype="float32", kv_cache_dtype="auto")
    verified = compile_verified(exact, verifier)
    if options == exact:
        return verified, errors
    return replace(compile_verified(options, None), passes=verified.passes), errors


def _write_part(folder: Path, part: _Part) -> None:
    (folder / PROGRAM_DIR).mkdir(parents=True)
    save_program(part.program, folder / PROGRAM_DIR)
    onnx.save(part.compiled.onnx_model, folder / ONNX_FILE)
    if part.engine is not None:
        (folder / ENGINE_FILE).write_bytes(part.engine.engine)
        layers = engine_label(part.engine.engine, folder) | part.engine.layers
        (folder / LAYERS_FILE).write_text(json.dumps(layers, indent=1) + "\n", encoding="utf-8")


def _write_kernels(folder: Path, kernels: Mapping[str, bytes]) -> None:
    for name, code in kernels.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(code)


def _manifest(folder: Path, job: _Job, parts: Sequence[_Part], calibration: Calibration | None, plan: Plan) -> Manifest:
    model, *drafts = parts
    options, source = job.options, job.source
    tools = {"python": platform.python_version()} | {name: version(name) for name in _TOOLS}
    if job.trt is not None:
        tools[job.trt.__name__] = job.trt.__version__
    return Manifest(
        config=job.config.to_dict(),
        precision=options.precision,
        ple_precision=options.ple_precision,
        ple_residency=options.ple_residency,
        host_weights=ngram_table_weights(model.compiled.program) if options.ple_residency == PleResidency.HOST else [],
        activation_dtype=options.activation_dtype,
        kv_cache_dtype=options.kv_dtype,
        weights=[asdict(row) for row in job.weight_table],
        calibration=calibration,
        target=options.engine_target if options.has_engine else None,
        backend=options.backend if options.has_engine else None,
        kernel_targets=options.all_kernel_targets,
        limits=job.limits,
        activation_bytes=plan.request.activations.num_bytes,
        vocab_size=job.config.vocab_size,
        stop_token_ids=job.text_files.stop_token_ids,
        checkpoint=None if source is None else CheckpointRef.of(source.checkpoint),
        converted=None if source is None or source.converted is None else CheckpointRef.of(source.converted),
        plugins=op_versions(),
        profiles=_profiles_to_json(model.profiles),
        debug_outputs=model.compiled.debug_outputs,
        passes=[asdict(result) for result in model.compiled.passes],
        draft=_draft_head(job, drafts[0]) if drafts else None,
        tools=tools,
        files=hash_files(folder),
    )


def _draft_head(job: _Job, part: _Part) -> DraftHead:
    return DraftHead(
        vocab_size=job.config.draft_vocab_size or job.config.vocab_size,
        has_token_ids=job.draft.token_ids is not None,
        profiles=_profiles_to_json(part.profiles),
        debug_outputs=part.compiled.debug_outputs,
        passes=[asdict(result) for result in part.compiled.passes],
    )


def _profiles_to_json(profiles: Mapping[str, Profile]) -> dict[str, Any]:
    return {name: {tensor: list(shapes) for tensor, shapes in p.items()} for name, p in profiles.items()}
