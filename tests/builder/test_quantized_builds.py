"""Tiny checkpoints in published formats: built with and without conversion, verified, with SM121 engines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import bundles
import onnx
import pytest
from quantized_checkpoints import write_quantized

from qwen4exp_trt.builder import build as build_module
from qwen4exp_trt.builder.build import BuildReport, build_bundle
from qwen4exp_trt.builder.compile import compile_program
from qwen4exp_trt.builder.inspection.bundle import StepRequest, inspect_bundle
from qwen4exp_trt.builder.options import BuildOptions
from qwen4exp_trt.plugins.spec import NAMESPACE
from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.manifest import ENGINE_FILE, ONNX_FILE

pytestmark = [pytest.mark.trt, pytest.mark.usefixtures("quick_builds")]

POLICY_OPS = ("Fp8", "Nvfp4", "Moe", "PleGather")
"""Parts of the names of the ops that depend on formats."""

NVFP4_OPS = {"Q4eNvfp4Moe": 2, "Q4eNvfp4Linear": 5, "Q4eNvfp4PleGather": 1}
"""Of the two layers and the head, if everything is NVFP4."""


@dataclass(frozen=True)
class Build:
    release: str
    options: dict[str, Any]
    ops: dict[str, int]
    fates: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str])
    """Component and stored format -> held format, of some rows of the table of weights."""


BUILDS = {
    "FP8 kept": Build(
        "FP8",
        {},
        {"Q4eFp8RoutedMoe": 2, "Q4eFp8PleGather": 1},
        {("routed experts", "fp8 blocks"): "fp8 blocks", ("n-gram table", "fp8"): "fp8"},
    ),
    "FP8 to NVFP4": Build(
        "FP8",
        {"precision": "nvfp4", "ple": "nvfp4", "verify": True},
        NVFP4_OPS,
        {("routed experts", "fp8 blocks"): "nvfp4", ("n-gram table", "fp8"): "nvfp4", ("lm_head", "float"): "nvfp4"},
    ),
    "NVFP4 experts kept": Build(
        "NVFP4 experts, FP8 table",
        {},
        {"Q4eNvfp4RoutedMoe": 2, "Q4eFp8PleGather": 1},
        {("routed experts", "nvfp4"): "nvfp4", ("n-gram table", "fp8"): "fp8"},
    ),
    "mixed kept": Build(
        "mixed precision",
        {"verify": True},
        # in_proj_qkv, in_proj_z, q_proj, o_proj and lm_head; their blocks of scales do not meet, so none is merged.
        {"Q4eFp8Linear": 5, "Q4eNvfp4Linear": 1, "Q4eNvfp4Moe": 2, "Q4eNvfp4PleGather": 1},
        {
            ("lm_head", "fp8"): "fp8",
            ("attention", "fp8 blocks"): "fp8 blocks",
            ("linear attention", "nvfp4"): "nvfp4",
            ("shared experts", "nvfp4"): "nvfp4",
            ("n-gram table", "nvfp4"): "nvfp4",
        },
    ),
    "mixed to W4A4": Build(
        "mixed precision",
        {"precision": "nvfp4-w4a4", "kv_cache_dtype": "fp8", "verify": True},
        NVFP4_OPS | {"Q4eNvfp4Linear": 1},
        {("lm_head", "fp8"): "nvfp4", ("attention", "fp8 blocks"): "nvfp4", ("linear attention", "nvfp4"): "nvfp4"},
    ),
    "mixed to BF16": Build(
        "mixed precision",
        {"precision": "bf16"},
        {"Q4eMoe": 2, "Q4ePleGather": 1},
        {
            ("lm_head", "fp8"): "bfloat16",
            ("routed experts", "nvfp4"): "bfloat16",
            ("n-gram table", "nvfp4"): "bfloat16",
        },
    ),
}


@cache
def checkpoint_of(folder: Path, release: str) -> Path:
    write_quantized(folder, release, bundles.config_dict())
    bundles.write_text_files(folder)
    return folder


@dataclass(frozen=True)
class Built:
    expected: Build
    report: BuildReport
    bundle: Path


SLOW_BUILDS = ("FP8 to NVFP4", "mixed kept", "mixed to W4A4")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] if name in SLOW_BUILDS else []) for name in BUILDS],
)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, quick_builds: None) -> Built:
    build = BUILDS[request.param]
    base = tmp_path_factory.getbasetemp() / "quantized-builds"
    base.mkdir(exist_ok=True)
    options = dict(build.options)
    if options.get("precision") == "nvfp4-w4a4":
        (base / "text.txt").write_text("Emma was not asleep when he came in.")
        options["calibration"] = base / "text.txt"
    checkpoint, output = checkpoint_of(base / build.release, build.release), base / request.param
    report = build_bundle(BuildOptions(checkpoint=checkpoint, output=output, **bundles.LIMITS, **options))
    return Built(build, report, output)


def test_ops_hold_the_formats(built: Built) -> None:
    nodes = onnx.load(str(built.bundle / ONNX_FILE)).graph.node
    ops = Counter(node.op_type for node in nodes if node.domain == NAMESPACE)
    assert {name: n for name, n in ops.items() if any(part in name for part in POLICY_OPS)} == built.expected.ops
    assert ENGINE_FILE in built.report.manifest.files


def test_the_table_of_weights_tells_the_formats(built: Built) -> None:
    rows = {(row["component"], row["stored"]): row for row in built.report.manifest.weights if row["stored"] != "float"}
    rows |= {(row["component"], "float"): row for row in built.report.manifest.weights if row["component"] == "lm_head"}
    for key, held in built.expected.fates.items():
        row = rows[key]
        remarks = [] if held == row["stored"] else ["dequantized" if held == "bfloat16" else "converted"]
        if built.expected.options.get("precision") == "nvfp4-w4a4" and "attention" in row["component"]:
            remarks.append("NVFP4 activations")
        assert (row["held"], row["remark"]) == (held, ", ".join(remarks)), key


def test_an_inspection_counts_elements(built: Built) -> None:
    bits = {"float4_e2m1fn": 4, "float8_e4m3fn": 8, "bfloat16": 16, "float32": 32, "int64": 64}
    for weight in inspect_bundle(built.bundle, StepRequest()).parts[0].weights:
        assert 8 * weight.num_bytes == bits[weight.dtype] * math.prod(map(int, weight.shape)), weight.name


def test_verification_finds_no_difference(built: Built) -> None:
    if built.expected.options.get("verify"):
        assert built.report.onnx_errors == {"float32": 0.0, "bfloat16": 0.0}
        assert all(result["max_error"] < 1e-5 for result in built.report.manifest.passes)


def test_it_generates(built: Built) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (3, 11)]
    assert [len(o.outputs[0].token_ids) for o in LLM(built.bundle).generate(prompts, params)] == [4, 4]


def test_passes_are_verified_with_an_exact_kv_cache(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In FP8 the last bit in which a pass may differ would become a whole step of a key or value."""
    exports: list[tuple[str, str, bool]] = []

    def record(
        config: Any, options: Any, quantization: Any, stage: Callable[..., None], verifier: Any, **_: Any
    ) -> Any:
        exports.append((options.activation_dtype, options.kv_cache_dtype, verifier is not None))
        return compile_program(config, options, quantization, stage)

    monkeypatch.setattr(build_module, "compile_program", record)
    checkpoint = bundles.tiny_checkpoint(tmp_path_factory.getbasetemp() / "tiny-checkpoint")
    bundles.build(checkpoint, tmp_path / "bundle", kv_cache_dtype="fp8", verify=True)
    assert exports == [("float32", "auto", True), ("float32", "float8_e4m3fn", False)]
