"""Plugin inputs that become outputs: which they are, what the ONNX and real engines have then, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bundles
import onnx
import pytest
import torch
from build_command import FLOAT32, Capture, refused
from quantized_checkpoints import write_quantized
from tiny_programs import BATCH, conv_state, floats, sample_steps, trace
from torch import Tensor, nn

from qwen4exp_trt.builder.__main__ import main
from qwen4exp_trt.builder.compile import ExportOptions, compile_program
from qwen4exp_trt.builder.interpret import OnnxProgram
from qwen4exp_trt.builder.lower import lower_program
from qwen4exp_trt.builder.plugin_inputs import check_patterns, plugin_inputs
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.passes.pipeline import Quantization
from qwen4exp_trt.passes.verification import initial_states, random_source
from qwen4exp_trt.runtime.bundle_programs import load_programs
from qwen4exp_trt.runtime.manifest import DRAFT_DIR, LAYERS_FILE, ONNX_FILE, Manifest
from qwen4exp_trt.runtime.materialize import materialize_weight
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.specs import TensorSpec
from qwen4exp_trt.runtime.tensorrt.engine_tensors import program_tensors

pytestmark = pytest.mark.usefixtures("quick_builds")

Q4E: Any = torch.ops.q4e
WIDTH, TAPS, HC = 8, 3, 2


class Block(nn.Module):
    """Plugins that read an input, another's results, a native op's, and the state that one of them updates."""

    def __init__(self) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.randn(WIDTH, TAPS), requires_grad=False)
        self.gain = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.down = nn.Parameter(torch.randn(5, WIDTH), requires_grad=False)

    def forward(self, x: Tensor, start: Tensor, lens: Tensor, slots: Tensor, count: Tensor, states: Any) -> Any:
        convolved = Q4E.causal_conv1d(x, self.taps, states[0], start, lens, slots, count)
        normed = Q4E.hc_norm(torch.sigmoid(convolved), self.gain, HC, 1e-6)
        low, inject = Q4E.hc_project(normed, self.down, HC)
        return [normed, torch.sigmoid(low), torch.sigmoid(Q4E.hc_norm(convolved, self.gain, HC, 1e-6)), inject]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, start: Tensor, lens: Tensor, slots: Tensor, count: Tensor, states: Any) -> Any:
        return self.block(x, start, lens, slots, count, states)


@pytest.fixture(scope="module")
def program() -> Program:
    return trace(Outer(), (*floats(x=("T", WIDTH)), *BATCH), [conv_state(TAPS - 1, WIDTH)])


def marked(program: Program, *patterns: str) -> list[str]:
    return [spec.name for spec in plugin_inputs(program, patterns)]


def test_computed_values_are_marked_in_their_order(program: Program) -> None:
    """Not the input ``x``, weights, the state, or the output ``out_0``, which a plugin reads too."""
    assert plugin_inputs(program, ["*"]) == (
        TensorSpec("block.causal_conv1d", ("T", WIDTH), "float32"),
        TensorSpec("block.sigmoid", ("T", WIDTH), "float32"),
    )


def test_patterns_are_of_the_plugins_that_read(program: Program) -> None:
    assert marked(program, "block.hc_norm") == ["block.sigmoid"]
    assert marked(program, "block.hc_norm_1") == ["block.causal_conv1d"]
    assert marked(program, "block.hc_norm_1", "*.hc_norm") == ["block.causal_conv1d", "block.sigmoid"]
    assert marked(program, "*.causal_conv1d") == [] and marked(program) == []


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("block.hc_nrm", "names such as block.hc_norm, block.hc_norm_1"),
        ("block.causal_conv1d", "matches no plugin that reads a computed value"),
        ("block.hc_project", "matches no plugin that reads a computed value"),
        ("sigmoid", "names such as"),
    ],
)
def test_a_pattern_that_marks_nothing_is_refused(program: Program, pattern: str, near: str) -> None:
    """Also one of a plugin that reads inputs or outputs only."""
    with pytest.raises(BuildError, match=r"--mark-plugin-inputs '.*' matches no plugin") as error:
        check_patterns([program], ["*", pattern])
    assert near in str(error.value)


def test_a_value_with_an_unbounded_dim_is_refused() -> None:
    class Read(nn.Module):
        def forward(self, gain: Tensor, states: Any) -> Tensor:
            return Q4E.hc_norm(states[0].view(-1, WIDTH) * 2, gain, HC, 1e-6)

    program = trace(Read(), floats(gain=(WIDTH,)), [conv_state(1, WIDTH)])
    with pytest.raises(BuildError, match=r"mul cannot be marked as an output: .* has the dynamic dim num_slots"):
        plugin_inputs(program, ["*"])


def test_marked_values_are_outputs_of_the_onnx(program: Program) -> None:
    """Behind the others and typed once; nodes are the same, so nothing reads the state that did not before."""
    plain, specs = lower_program(program), plugin_inputs(program, ["*"])
    model = lower_program(program, specs)
    onnx.checker.check_model(model)
    assert model.graph.node == plain.graph.node and model.graph.input == plain.graph.input
    outputs = list(model.graph.output)
    assert outputs[: -len(specs)] == list(plain.graph.output)
    assert [value.name for value in outputs[-len(specs) :]] == [spec.name for spec in specs]
    known = {value.name: value for value in plain.graph.value_info}
    assert outputs[-len(specs) :] == [known.pop(spec.name) for spec in specs]
    assert list(model.graph.value_info) == list(known.values())


def test_the_onnx_gives_marked_values(program: Program) -> None:
    model = lower_program(program, plugin_inputs(program, ["*"]))
    weights = {spec.name: materialize_weight(spec, random_source(program.weights)) for spec in program.weights}
    sample = sample_steps(program)
    results = OnnxProgram(model).run({**sample.steps[0], **weights, **initial_states(program, sample)})
    assert torch.equal(results["block.sigmoid"], results["block.causal_conv1d"].sigmoid())


# --- builds -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a draft head."""
    return bundles.mtp_checkpoint(tmp_path_factory.getbasetemp())


LIMITS = ["--max-seq-len", "64", "--block-size", "8", "--max-batch-size", "2"]


def test_all_of_a_model_are_marked_without_a_pattern(checkpoint: Path) -> None:
    options = ExportOptions("bfloat16", "auto", 8)
    compiled = compile_program(ModelConfig.from_dir(checkpoint), options, Quantization())
    plugins = {node.name: node.input for node in compiled.onnx_model.graph.node if node.domain == "q4e"}
    states = {spec.out_name for spec in compiled.program.states}
    made = {name for node in compiled.onnx_model.graph.node for name in node.output} - states
    read = {name for inputs in plugins.values() for name in inputs}
    outputs = {spec.name for spec in compiled.program.outputs}
    assert set(marked(compiled.program, "*")) == (made & read) - outputs
    first = marked(compiled.program, "layers.0.*")
    assert 0 < len(first) < len(marked(compiled.program, "*"))


def test_engines_of_float32_are_refused(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    said = refused(capsys, tmp_path, checkpoint, "-o", tmp_path / "bundle", *FLOAT32, "--mark-plugin-inputs")
    assert "--mark-plugin-inputs makes outputs of an engine, and a bundle with float32 activations has none" in said


def test_a_bad_pattern_ends_the_build_before_it_writes(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    said = refused(capsys, tmp_path, checkpoint, "-o", tmp_path / "bundle", *LIMITS, "--mark-plugin-inputs", "mpl.*")
    assert "--mark-plugin-inputs 'mpl.*' matches no plugin" in said


def assert_io_is_the_programs(bundle: Path) -> int:
    """What TensorRT says of the engines' tensors is what the manifest and the programs say; how many are marked."""
    manifest = Manifest.load(bundle)
    parts = [(bundle, manifest.debug_outputs)]
    if manifest.draft is not None:
        parts.append((bundle / DRAFT_DIR, manifest.draft.debug_outputs))
    programs = load_programs(bundle, manifest, manifest.draft is not None)
    for (folder, specs), program in zip(parts, programs, strict=True):
        found = json.loads((folder / LAYERS_FILE).read_text())["io_tensors"]
        expected = program_tensors(program, specs)
        assert {tensor["name"]: tensor["mode"] == "input" for tensor in found} == {
            name: tensor.is_input for name, tensor in expected.items()
        }
        dims = {tensor["name"]: tuple(tensor["dims"]) for tensor in found}
        assert dims == {name: tensor.shape for name, tensor in expected.items()}
        graph = onnx.load(folder / ONNX_FILE).graph
        states = [spec.name for spec in program.states]
        assert all(sum(name in node.input for node in graph.node) == 1 for name in states), "one reader each"
    return len(manifest.all_debug_outputs)


@pytest.mark.trt
def test_a_build_says_and_records_what_is_marked(checkpoint: Path, tmp_path: Path, capsys: Capture) -> None:
    """The model's and the draft head's, by patterns for some of both."""
    patterns = ["layers.0.mlp.*", "*.qsa_select", "mtp.*.qsa_attention"]
    argv = [str(checkpoint), "-o", str(tmp_path / "bundle"), *LIMITS, "--mark-plugin-inputs", *patterns]
    assert main(argv) == 0
    manifest = Manifest.load(tmp_path / "bundle")
    select, attention = "self_attn.indexer.qsa_select", "self_attn.q_proj_k_proj_v_proj"
    indexer = "self_attn.indexer.qsa_indexer"
    assert [spec.name for spec in manifest.debug_outputs] == [
        "layers.0.mlp_hyper_connection.hc_read.mixed",
        f"layers.1.{indexer}",
    ]
    assert manifest.draft is not None
    assert [spec.name for spec in manifest.draft.debug_outputs] == [
        f"mtp.layers.0.{indexer}",
        f"mtp.layers.0.{select}",
        f"mtp.layers.0.{attention}",
    ]
    rows = manifest.limits.largest_step
    num_bytes = sum(spec.num_bytes(rows) for spec in manifest.all_debug_outputs)
    assert num_bytes == 64 * (2 * (32 + 32) + 2 * 32 + 4 * 4 + 2 * 192)
    out = capsys.readouterr().out
    assert f"debug outputs         5 plugin inputs are outputs, {num_bytes / 1024:.2f} KiB in the largest step" in out
    assert "5 plugin inputs that are marked" in out, "the plan"
    assert assert_io_is_the_programs(tmp_path / "bundle") == 5


ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "FP8": ("FP8", {"kv_cache_dtype": "fp8"}),
    "NVFP4": ("NVFP4 experts, FP8 table", {"precision": "nvfp4", "ple": "nvfp4"}),
    "W4A4": ("mixed precision", {"precision": "nvfp4-w4a4", "ple_residency": "disk"}),
    "mixed": ("mixed precision", {"ple_residency": "host"}),
}


@pytest.mark.trt
@pytest.mark.slow
@pytest.mark.parametrize("name", ENGINES)
def test_engines_of_every_precision_have_the_marked_outputs(name: str, tmp_path: Path) -> None:
    release, options = ENGINES[name]
    head = {"mtp_num_hidden_layers": 1} if release == "FP8" else {}
    write_quantized(tmp_path / "checkpoint", release, bundles.config_dict(**head))
    bundles.write_text_files(tmp_path / "checkpoint")
    if options.get("precision") == "nvfp4-w4a4":
        options = options | {"calibration": bundles.HELDOUT_TEXT}
    bundle = bundles.build(
        *(tmp_path / "checkpoint", tmp_path / "bundle"),
        activation_dtype="bfloat16",
        mark_plugin_inputs=("*",),
        **options,
    )
    assert assert_io_is_the_programs(bundle) > 20
