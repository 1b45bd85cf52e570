"""The demo checkpoint under every policy: what is in its SM121 engine, its manifest and its ONNX, and that it runs."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import bundles
import onnx
import pytest
import torch

from qwen4exp_trt.builder.convert import num_table_scales
from qwen4exp_trt.builder.interpret import OnnxProgram
from qwen4exp_trt.builder.policy import is_table
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.weights import expected_weights
from qwen4exp_trt.passes.verification import batch_samples, initial_states, relative_error
from qwen4exp_trt.plugins.spec import NAMESPACE
from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.manifest import LAYERS_FILE, ONNX_FILE, Manifest

pytestmark = [pytest.mark.trt, pytest.mark.usefixtures("quick_builds")]

CALIBRATION_TEXT = "Emma was not asleep when he came into the room, but she would not own it."

POLICY_OPS = ("Fp8", "Nvfp4", "Moe", "PleGather")
"""Parts of the names of the plugins that depend on the policy."""
ENGINE_DTYPES = {"float4_e2m1fn_x2": "FP4", "float8_e4m3fn": "FP8"}
"""Those of quantized weights, and how TensorRT spells them."""

CONVERTED = {
    "routed experts": 8 * 2,
    "shared experts": 8 * 3,
    "linear attention": 6 * 3,
    "attention": 2 * 4,
    "lm_head": 1,
    "draft head experts": 2,
    "draft head, others": 3 + 4,
}
"""The weights that become NVFP4, of 6 layers with linear attention, 2 with full attention, and the draft head."""


@dataclass(frozen=True)
class Policy:
    """Options of a build, and what follows from them."""

    options: dict[str, Any]
    plugins: dict[str, int]
    """Those of `POLICY_OPS` in each profile, and how many."""
    converted: dict[str, int] = field(default_factory=dict[str, int])
    """Component -> its weights that are in files beside the bundle."""


POLICIES = {
    "checkpoint": Policy({}, {"Q4eMoe": 8, "Q4ePleGather": 1}),
    "bf16": Policy({"precision": "bf16"}, {"Q4eMoe": 8, "Q4ePleGather": 1}),
    "nvfp4": Policy(
        {"precision": "nvfp4", "ple": "nvfp4", "kv_cache_dtype": "fp8"},
        # q | k | v and qkv | z are one projection each.
        {"Q4eNvfp4Moe": 8, "Q4eNvfp4Linear": 8 * 2 + 1, "Q4eNvfp4PleGather": 1},
        converted=CONVERTED | {"n-gram table": 1},
    ),
    "nvfp4-w4a4": Policy(
        {"precision": "nvfp4-w4a4", "keep": ("layers.0.*",)},
        {"Q4eMoe": 1, "Q4eNvfp4Moe": 7, "Q4eNvfp4Linear": 1, "Q4ePleGather": 1},
        converted=CONVERTED | {"routed experts": 7 * 2, "shared experts": 7 * 3, "linear attention": 5 * 3},
    ),
}


@dataclass(frozen=True)
class Built:
    """A policy and its bundle."""

    policy: Policy
    bundle: Path

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.bundle / LAYERS_FILE).read_text(encoding="utf-8"))

    @property
    def manifest(self) -> Manifest:
        return Manifest.load(self.bundle)

    @property
    def backend(self) -> EagerBackend:
        backend = load(self.bundle).core.backend
        assert isinstance(backend, EagerBackend)
        return backend


@cache
def build(base: Path, name: str) -> Built:
    policy, text = POLICIES[name], base / "calibration.txt"
    text.write_text(CALIBRATION_TEXT)
    calibration = text if name == "nvfp4-w4a4" else None
    options = {"activation_dtype": "bfloat16", "max_seq_len": 256, "calibration": calibration} | policy.options
    return Built(policy, bundles.build(bundles.DEMO_CHECKPOINT, base / name, **options))


@cache
def load(bundle: Path) -> LLM:
    return LLM(bundle)


@pytest.fixture(params=[pytest.param(name, marks=[] if name == "nvfp4" else [pytest.mark.slow]) for name in POLICIES])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Built once a session; all share the folder of converted weights."""
    base = tmp_path_factory.getbasetemp() / "demo-policies"
    base.mkdir(exist_ok=True)
    return build(base, request.param)


def plugins(built: Built, profile: str) -> Counter[str]:
    """The op of each layer of a profile that is one plugin."""
    nodes = onnx.load(str(built.bundle / ONNX_FILE)).graph.node
    ops = {node.name: node.op_type for node in nodes if node.domain == NAMESPACE}
    layers = [layer for layer in built.report["layers"] if layer["profile"] == profile]
    found = [layer["modules"] for layer in layers if layer["type"] in ("custom_layer", "PluginV3")]
    return Counter(ops[path] for modules in found for path in modules)


def fp4_gemms(built: Built, profile: str) -> list[str]:
    """The projections whose layer is a GEMM of two FP4 operands."""
    layers = [layer for layer in built.report["layers"] if (layer["profile"], layer["type"]) == (profile, "gemm")]
    gemms = [layer for layer in layers if [t["dtype"] for t in layer["inputs"]].count("FP4E2M1") == 2]
    products = [path for layer in gemms for path in layer["modules"] if path.endswith(".product")]
    assert len(products) == len(gemms)
    return sorted(path.removesuffix(".product") for path in products)


@pytest.mark.parametrize("profile", ["decode", "prefill"])
def test_the_engine_has_the_ops_of_the_policy(built: Built, profile: str) -> None:
    found = {name: n for name, n in plugins(built, profile).items() if any(part in name for part in POLICY_OPS)}
    assert found == built.policy.plugins
    calibration = built.manifest.calibration
    assert fp4_gemms(built, profile) == ([] if calibration is None else sorted(calibration.scales))


def test_quantized_weights_are_network_inputs_that_no_layer_writes_out(built: Built) -> None:
    program = built.backend.program
    specs = [*(spec.tensor for spec in program.weights), *program.states]
    expected = {spec.name: ENGINE_DTYPES[spec.dtype] for spec in specs if spec.dtype in ENGINE_DTYPES}
    assert bool(expected) == bool(built.policy.converted)
    inputs = {t["name"]: t for t in built.report["io_tensors"] if t["mode"] == "input"}
    found = {name: t["dtype"] for name, t in inputs.items() if t["dtype"] in ENGINE_DTYPES.values()}
    assert found == expected
    shapes = [sorted(t["dims"]) for t in inputs.values() if t["dtype"] == "FP4"]
    written = [t for layer in built.report["layers"] for t in layer["outputs"] if sorted(t["dims"]) in shapes]
    assert written == []


def test_the_manifest_tells_what_became_of_the_weights(built: Built) -> None:
    manifest, config = built.manifest, ModelConfig.from_dir(bundles.DEMO_CHECKPOINT)
    assert manifest.precision == built.policy.options.get("precision", "checkpoint")
    default = "bf16" if manifest.precision == "bf16" else "checkpoint"
    assert manifest.ple_precision == built.policy.options.get("ple", default)
    assert manifest.activation_dtype == "bfloat16"
    assert manifest.kv_cache_dtype == ("float8_e4m3fn" if "kv_cache_dtype" in built.policy.options else "bfloat16")
    converted = Counter[str]()
    for row in manifest.weights:
        assert row["stored"] == ("float" if row["held"] == "nvfp4" else "bfloat16")
        assert row["remark"].startswith("converted") == (row["held"] == "nvfp4")
        reads_nvfp4 = manifest.precision == "nvfp4-w4a4" and row["component"] in ("attention", "linear attention")
        assert row["remark"].endswith("NVFP4 activations") == (reads_nvfp4 and row["held"] == "nvfp4")
        assert row["held"] in ("nvfp4", "bfloat16")
        converted[row["component"]] += row["num_weights"] * (row["held"] == "nvfp4")
    assert +converted == built.policy.converted
    assert sum(row["num_weights"] for row in manifest.weights) == len(expected_weights(config))
    kept = sum(row["num_weights"] for row in manifest.weights if row["remark"] == "--keep layers.0.*")
    assert kept == (2 + 3 + 3 if "keep" in built.policy.options else 0), "those that would be converted"


def test_converted_files_are_beside_the_bundle(built: Built) -> None:
    ref, num_weights = built.manifest.converted, sum(built.policy.converted.values())
    if not num_weights:
        assert ref is None
        return
    assert ref is not None and ref.path == str(built.bundle.parent / "converted-weights")
    shapes = expected_weights(ModelConfig.from_dir(bundles.DEMO_CHECKPOINT))
    (table,) = [shape for name, shape in shapes.items() if is_table(name)]
    of_table = num_table_scales(table[0]) if "n-gram table" in built.policy.converted else 0
    assert len(ref.files) == num_weights + max(of_table - 1, 0)


def test_calibration_has_every_projection_of_the_layers(built: Built) -> None:
    calibration = built.manifest.calibration
    if "keep" not in built.policy.options:
        assert calibration is None
        return
    assert calibration is not None and calibration.text == "calibration.txt"
    layers = Counter(path.split(".")[1] for path in calibration.scales)
    assert layers == {str(layer): 2 for layer in range(1, 8)}, "neither the kept layer nor the head"


def test_the_onnx_is_the_program(built: Built) -> None:
    """Bitwise, over prefill, chunks beside decoding sequences, and decoding."""
    backend = built.backend
    program, interpreter = backend.program, OnnxProgram(onnx.load(str(built.bundle / ONNX_FILE)))
    sample = batch_samples(backend.weights["embed_tokens.weight"].shape[0], bundles.LIMITS["block_size"], 4)[1]
    expected, got = initial_states(program, sample), initial_states(program, sample)
    for inputs in sample.steps:
        logits = program.run(inputs, expected, backend.weights)["logits"]
        results = interpreter.run({**inputs, **backend.weights, **got})
        assert torch.isfinite(logits).all() and torch.equal(results["logits"], logits)
        for spec in program.states:
            assert relative_error(expected[spec.name], got[spec.name]) == 0, spec.name


def test_it_generates(built: Built) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    outputs = load(built.bundle).generate(["When they came to the house, ", "In the beginning"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [6, 6]
