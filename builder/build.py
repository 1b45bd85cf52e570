"""Checkpoint in, bundle out."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import onnx

from qwen4exp_trt.builder.activations import estimate_activations
from qwen4exp_trt.builder.bundle import check_output, hash_files, staged_folder
from qwen4exp_trt.builder.compile import CompiledProgram, Stage, compile_program
from qwen4exp_trt.builder.engine import EngineBuild, build_engine, check_target
from qwen4exp_trt.builder.options import DEFAULT_TARGET, BuildOptions, PlanOptions
from qwen4exp_trt.builder.plan import ActivationMemory, Plan, PlanRequest, make_plan
from qwen4exp_trt.builder.profiles import Profile, optimization_profiles
from qwen4exp_trt.builder.text_files import TextFiles
from qwen4exp_trt.builder.verify import check_memory, make_verifier, verify_onnx
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.weights import ResolvedWeights, resolve_weights
from qwen4exp_trt.passes.verification import Verifier
from qwen4exp_trt.plugins.registry import op_versions
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.manifest import ENGINE_FILE, LAYERS_FILE, ONNX_FILE, PROGRAM_DIR, CheckpointRef, Manifest
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.program_text import save_program
from qwen4exp_trt.runtime.trt_module import load_trt

_TOOLS = ("torch", "onnx")


@dataclass(frozen=True)
class _Source:
    """The checkpoint and how it provides the weights."""

    checkpoint: Checkpoint
    weights: ResolvedWeights


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
    """Largest relative error of the executed ONNX by precision; empty unless verified."""


def plan_bundle(options: PlanOptions, config: ModelConfig) -> Plan:
    """What the bundle will need on its target."""
    target = options.engine_target if options.has_engine else None
    if target is not None and not re.fullmatch(r"sm\d{2,3}", target):
        raise BuildError(f"--target is {target!r}; it must be a GPU architecture such as {DEFAULT_TARGET}")
    limits = options.limits_for(config)
    request = PlanRequest(
        config=config,
        limits=limits,
        target=target,
        precision=options.precision,
        ple=options.precision,
        choose_formats=lambda precision, ple: {},
        activations=ActivationMemory(estimate_activations(config, options.precision, limits), is_estimate=True),
        activation_dtype=options.precision,
    )
    return make_plan(request)


def build_bundle(
    options: BuildOptions, stage: Stage, show_plan: Callable[[Plan], None] = lambda plan: None
) -> BuildReport:
    """Build and write a bundle; ``stage`` is told each step, ``show_plan`` before the costly ones what it will need.

    Nothing stays behind when a step fails.
    """
    options.check()
    check_output(options.output)
    stage("config")
    config = options.read_config()
    limits = options.limits_for(config)
    text_files = TextFiles.from_dir(options.text_folder, config)
    trt = _load_trt(options)
    plan = plan_bundle(options, config)
    show_plan(plan)
    source = None
    if not options.config_only:
        stage("checkpoint")
        checkpoint = Checkpoint.open(options.checkpoint)
        source = _Source(checkpoint, resolve_weights(config, checkpoint))
    compiled, onnx_errors = _compile(options, config, source, stage)
    program = compiled.program
    if source is not None:
        program = program.map_weight_sources(source.weights.recipes.__getitem__)
    profiles = optimization_profiles(limits, (*program.inputs, *program.states))
    engine = None
    if trt is not None:
        stage("engine")
        engine = build_engine(trt, compiled.onnx_model, profiles, options.engine_target)
        plan = plan.with_activations(engine.activation_bytes)
    stage("write")
    with staged_folder(options.output) as folder:
        _write_files(folder, program, compiled.onnx_model, engine)
        text_files.copy_to(folder)
        manifest = _manifest(folder, options, config, limits, source, text_files, compiled, profiles, trt)
        manifest.save(folder)
    set_aside = {} if source is None else {kind: len(names) for kind, names in source.weights.set_aside.items()}
    return BuildReport(manifest, program, plan, set_aside, onnx_errors)


def _load_trt(options: BuildOptions) -> ModuleType | None:
    """The TensorRT module that can build for the target; None for a bundle without an engine."""
    if not options.has_engine:
        return None
    trt = load_trt(options.backend)
    check_target(trt, options.engine_target)
    return trt


def _compile(
    options: BuildOptions, config: ModelConfig, source: _Source | None, stage: Stage
) -> tuple[CompiledProgram, dict[str, float]]:
    """Compile; with ``--verify`` execute every pass in float32, and the ONNX in both precisions."""
    if not options.verify:
        return compile_program(config, options.precision, options.block_size, stage), {}
    assert source is not None
    check_memory(config)
    verifier = make_verifier(config, options.block_size, source.weights, source.checkpoint)
    errors: dict[str, float] = {}

    def compile_verified(precision: str, pass_verifier: Verifier | None) -> CompiledProgram:
        compiled = compile_program(
            config, precision, options.block_size, lambda name: stage(f"{name} ({precision})"), pass_verifier
        )
        stage(f"run onnx ({precision})")
        errors[precision] = verify_onnx(compiled.program, compiled.onnx_model, verifier)
        return compiled

    verified = compile_verified("float32", verifier)
    if options.precision == "float32":
        return verified, errors
    return replace(compile_verified(options.precision, None), passes=verified.passes), errors


def _write_files(folder: Path, program: Program, model: onnx.ModelProto, engine: EngineBuild | None) -> None:
    (folder / PROGRAM_DIR).mkdir()
    save_program(program, folder / PROGRAM_DIR)
    onnx.save(model, folder / ONNX_FILE)
    if engine is not None:
        (folder / ENGINE_FILE).write_bytes(engine.engine)
        (folder / LAYERS_FILE).write_text(json.dumps(engine.layers, indent=1) + "\n", encoding="utf-8")


def _manifest(
    folder: Path,
    options: BuildOptions,
    config: ModelConfig,
    limits: EngineLimits,
    source: _Source | None,
    text_files: TextFiles,
    compiled: CompiledProgram,
    profiles: dict[str, Profile],
    trt: ModuleType | None,
) -> Manifest:
    tools = {"python": platform.python_version()} | {name: version(name) for name in _TOOLS}
    if trt is not None:
        tools[trt.__name__] = trt.__version__
    checkpoint = None
    if source is not None:
        checkpoint = CheckpointRef(str(source.checkpoint.path.resolve()), source.checkpoint.identity())
    return Manifest(
        config=config.to_dict(),
        precision=options.precision,
        target=options.engine_target if options.has_engine else None,
        backend=options.backend if options.has_engine else None,
        limits=limits,
        vocab_size=config.vocab_size,
        stop_token_ids=text_files.stop_token_ids,
        checkpoint=checkpoint,
        plugins=op_versions(),
        profiles={name: {tensor: list(shapes) for tensor, shapes in p.items()} for name, p in profiles.items()},
        passes=[asdict(result) for result in compiled.passes],
        tools=tools,
        files=hash_files(folder),
    )
