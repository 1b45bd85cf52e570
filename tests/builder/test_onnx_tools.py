"""A bundle's ONNX in the tools that its users inspect and cut it with: ONNX GraphSurgeon and Polygraphy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import bundles
import numpy as np
import onnx
import onnx_graphsurgeon as gs
import pytest
import torch

from qwen4exp_trt.builder.interpret import node_functions
from qwen4exp_trt.builder.layers import REPORT_START, layer_report
from qwen4exp_trt.builder.polygraphy_command import (
    PROG,
    USE_RTX,
    convert_flags,
    extract_flags,
    main,
    reference_of,
)
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.spec import NAMESPACE
from qwen4exp_trt.runtime.bundle_programs import load_programs
from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.program import path_from_identifier

pytestmark = pytest.mark.trt

DOCS = (bundles.ROOT / "docs" / "polygraphy.md").read_text(encoding="utf-8")
INPUTS_SCRIPT = re.search(r"```python\n(.*?)```", DOCS, re.DOTALL)
MODULE, OTHER = "layers.1.self_attn", "layers.0.mlp"
RUN = """\
import json, sys
from qwen4exp_trt.builder.polygraphy_command import main
for arguments in json.load(sys.stdin):
    print(chr(0), flush=True)
    print(main(arguments), flush=True)
"""


@pytest.fixture(scope="module")
def bundle(quick_builds: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("polygraphy")
    return bundles.build(
        bundles.tiny_checkpoint(tmp_path_factory.getbasetemp() / "tiny-checkpoint"),
        folder / "bundle",
        activation_dtype="bfloat16",
        draft_head="none",
    )


@pytest.fixture(scope="module")
def plugin_paths(bundle: Path) -> dict[str, str]:
    """Module path of each plugin of the bundle's program -> its ONNX op type."""
    program = load_programs(bundle, Manifest.load(bundle), False)[0]
    op_types = {spec.qualified_name: spec.onnx_op_type for spec in all_specs().values()}
    calls = [node for node in program.calls() if NAMESPACE in str(node.target)]
    return {path_from_identifier(node.name): op_types[node.target._schema.name] for node in calls}


@pytest.fixture(scope="module")
def outputs(bundle: Path) -> Mapping[str, str]:
    """What Polygraphy prints for each of the commands of the documentation, in one process: importing takes long."""
    folder, model = bundle.parent, str(bundle / "decoder.onnx")
    assert INPUTS_SCRIPT
    (folder / "inputs.py").write_text(INPUTS_SCRIPT[1])
    commands = {
        "layers": ["inspect", "model", model, "--show", "layers", "attrs", "weights"],
        "network": ["inspect", "model", model, "--display-as", "trt", "--show", "layers"],
        "capability": ["inspect", "capability", model],
        "sanitize": ["surgeon", "sanitize", model, "-o", "clean.onnx", "--cleanup", "--toposort"],
        "convert": ["convert", model, "-o", "new.engine", "-vv", *convert_flags(Path(model), "tensorrt-rtx")],
        "extract": ["surgeon", "extract", model, "-o", "part.onnx", *extract_flags(Path(model), MODULE)],
        "run": ["run", "part.onnx", "--pluginref", "--data-loader-script", "inputs.py"],
        "engine": ["inspect", "model", str(bundle / "decoder.engine")],
        "damaged": ["convert", "damaged.onnx", "-o", "damaged.engine"],
    }
    (folder / "damaged.onnx").write_bytes(b"no model")
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(list(commands.values())),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
        env={**os.environ, USE_RTX: "1"},
    )
    assert done.returncode == 0, done.stdout
    return dict(zip(commands, done.stdout.split("\0\n")[1:], strict=True))


def assert_passed(output: str) -> None:
    assert output.endswith("\n0\n"), output[-2000:]


def test_graphsurgeon_keeps_every_plugin_node(bundle: Path, plugin_paths: Mapping[str, str]) -> None:
    graph = gs.import_onnx(onnx.load(bundle / "decoder.onnx")).cleanup().toposort()
    assert {node.name: node.op for node in graph.nodes if node.domain == NAMESPACE} == plugin_paths
    onnx.checker.check_model(gs.export_onnx(graph))


def test_nodes_are_shown_by_module_path(outputs: Mapping[str, str], plugin_paths: Mapping[str, str]) -> None:
    assert_passed(outputs["layers"])
    nodes = dict(re.findall(r"Node \d+ +\| (\S+) \[Op: (\w+)\]", outputs["layers"]))
    assert {name: op for name, op in nodes.items() if op.startswith("Q4e")} == plugin_paths
    assert f"{MODULE}.kv_cache_out [dtype=bfloat16" in outputs["layers"]
    assert f"{MODULE}.qsa_attention.num_heads = " in outputs["layers"]


def test_tensorrt_parses_every_plugin(outputs: Mapping[str, str], plugin_paths: Mapping[str, str]) -> None:
    assert_passed(outputs["network"])
    layers = re.findall(r"Layer \d+ +\| (\S+) \[Op: LayerType.PLUGIN_V3\]", outputs["network"])
    assert sorted(layers) == sorted(plugin_paths)
    assert_passed(outputs["capability"])
    assert "Graph is fully supported by TensorRT" in outputs["capability"]


def test_sanitize_keeps_every_node(outputs: Mapping[str, str], bundle: Path) -> None:
    assert_passed(outputs["sanitize"])
    names = [
        [node.name for node in onnx.load(path).graph.node]
        for path in (bundle / "decoder.onnx", bundle.parent / "clean.onnx")
    ]
    assert sorted(names[0]) == sorted(names[1])


def test_convert_makes_the_layers_of_the_bundles_engine(outputs: Mapping[str, str], bundle: Path) -> None:
    assert_passed(outputs["convert"])
    assert "Setting 1 target compute capabilities: [(12, 1)]" in outputs["convert"]
    report = textwrap.dedent(outputs["convert"].partition(REPORT_START)[2].partition("\n[")[0])
    made = layer_report([REPORT_START + report], ["decode", "prefill"])
    built = json.loads((bundle / "layers.json").read_text())
    described = [
        {(layer["name"], layer["profile"], layer.get("plugin"), *layer["modules"]) for layer in layers["layers"]}
        for layers in (made, built)
    ]
    assert described[0] == described[1]
    assert len(described[0]) > 20
    assert (bundle.parent / "new.engine").stat().st_size > 100_000


def test_a_cut_out_module_runs_on_the_cpu(outputs: Mapping[str, str], bundle: Path) -> None:
    assert_passed(outputs["extract"])
    part = onnx.load(bundle.parent / "part.onnx")
    onnx.checker.check_model(part)
    assert all(node.name.startswith(f"{MODULE}.") for node in part.graph.node) and len(part.graph.node) >= 5
    assert_passed(outputs["run"])
    assert f"{MODULE}.o_proj.linear [dtype=bfloat16, shape=(2, " in outputs["run"]
    states = ["indexer.index_k_cache", "indexer.index_k_ring", "indexer.index_position_ring", "kv_cache"]
    ends = [*(f"{state}_out" for state in states), "o_proj.linear"]
    assert [value.name for value in part.graph.output] == [f"{MODULE}.{end}" for end in ends]


def test_a_reference_leaves_states_alone() -> None:
    spec = all_specs()["causal_conv1d"]
    operands = spec.cases[0].make(torch.float32, torch.Generator().manual_seed(0))
    tensors = [operands[arg.name] for arg in spec.inputs]
    before = [tensor.clone() for tensor in tensors]
    attrs = {attr.name: operands[attr.name] for attr in spec.attrs}
    results = reference_of(node_functions()[NAMESPACE, spec.onnx_op_type])(attrs, *tensors)
    assert all(torch.equal(tensor, old) for tensor, old in zip(tensors, before, strict=True))
    assert not torch.equal(results[-1], operands["conv_state"])


def test_a_reference_takes_constants_and_dtypes_of_graphsurgeon() -> None:
    cast = reference_of(node_functions()["", "Cast"])
    assert cast({"to": np.dtype(np.float32)}, np.array([1, 2]))[0].dtype == torch.float32
    assert cast({"to": onnx.TensorProto.BFLOAT16}, np.array([1, 2]))[0].dtype == torch.bfloat16


def test_an_engine_says_that_it_needs_its_gpu(outputs: Mapping[str, str]) -> None:
    if not torch.cuda.is_available():
        assert f"{PROG}: PyTorch sees no GPU here; an engine can be read only on the GPU" in outputs["engine"]
        assert outputs["engine"].endswith("\n1\n")


def test_what_needs_no_gpu_does_not_ask_for_one(outputs: Mapping[str, str]) -> None:
    assert outputs["damaged"].endswith("\n1\n")
    assert "GPU" not in outputs["damaged"]


@pytest.mark.parametrize(
    ("content", "message"), [(b"no model", "not an ONNX model: "), (b"", "an ONNX model without a node")]
)
def test_file_that_is_no_model(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "decoder.onnx").write_bytes(content)
    assert main(["--extract-flags", str(tmp_path / "decoder.onnx"), MODULE]) == 2
    error = capsys.readouterr().err
    assert f"{tmp_path / 'decoder.onnx'}: {message}" in error
    assert error.count("\n") == 1


def test_without_a_tool(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "give a tool of Polygraphy, such as inspect, or one of --convert-flags" in capsys.readouterr().err


def test_module_with_no_node(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--extract-flags", str(bundle / "decoder.onnx"), "layers.1.self"]) == 2
    assert "no node is of the module layers.1.self; modules that have some: embed_tokens, " in capsys.readouterr().err


def test_flags_are_printed_in_one_line(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(bundle / "decoder.onnx")
    assert main(["--extract-flags", model, OTHER]) == 0
    assert capsys.readouterr().out.split() == extract_flags(Path(model), OTHER)
    assert main(["--convert-flags", model]) == 0
    printed = capsys.readouterr().out.split()
    assert printed == convert_flags(Path(model), "tensorrt")  # the environment does not select TensorRT for RTX
    assert "--compute-capabilities" not in printed


def test_constants_are_no_inputs_of_a_part(bundle: Path) -> None:
    graph = onnx.load(bundle / "decoder.onnx").graph
    module = "hyper_connection_mixer"
    constants = {tensor.name for tensor in graph.initializer if tensor.name.startswith(f"{module}.")}
    inputs = {flag.partition(":")[0] for flag in extract_flags(bundle / "decoder.onnx", module)}
    assert constants and not constants & inputs


def test_convert_flags_need_a_bundle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--convert-flags", str(tmp_path / "decoder.onnx")]) == 2
    assert "not a bundle, it has no manifest.json" in capsys.readouterr().err


def test_convert_flags_are_of_the_bundles_model_alone(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--convert-flags", str(bundle / "other.onnx")]) == 2
    assert f"{bundle / 'other.onnx'}: not the decoder.onnx of a bundle with an engine" in capsys.readouterr().err


@pytest.mark.slow
def test_convert_flags_of_a_draft_head(quick_builds: None, tmp_path_factory: pytest.TempPathFactory) -> None:
    checkpoint = bundles.mtp_checkpoint(tmp_path_factory.getbasetemp())
    folder = bundles.build_with_stand_in(checkpoint, tmp_path_factory.mktemp("drafts") / "bundle")
    with_stack = [
        any(flag.startswith("stack:") for flag in convert_flags(path / "decoder.onnx", "tensorrt-rtx"))
        for path in (folder, folder / "mtp")
    ]
    assert with_stack == [False, True]


def test_without_tensorrt_one_line_tells_of_the_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(USE_RTX, raising=False)
    assert main(["inspect", "model", "x.onnx"]) == 2
    said = capsys.readouterr().err
    assert f"the Python module tensorrt is not installed; set {USE_RTX}=1 to work with" in said
    assert said.count("\n") == 1
