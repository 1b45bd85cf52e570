"""A bundle's ONNX in the tools that its users inspect and cut it with: ONNX GraphSurgeon and Polygraphy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
import pytest

from qwen4exp_trt.builder.compile import CompiledProgram
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.spec import NAMESPACE
from qwen4exp_trt.runtime.program import path_from_identifier


@pytest.fixture
def decoder(compiled: CompiledProgram, tmp_path: Path) -> Path:
    onnx.save(compiled.onnx_model, tmp_path / "decoder.onnx")
    return tmp_path / "decoder.onnx"


def polygraphy(*args: str) -> str:
    command = [sys.executable, "-c", "from polygraphy.tools import main; main()", *args]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_graphsurgeon_keeps_every_plugin_node(compiled: CompiledProgram, decoder: Path) -> None:
    plugins = {path_from_identifier(node.name): node for node in compiled.program.calls() if "q4e" in str(node.target)}
    graph = gs.import_onnx(onnx.load(decoder)).cleanup().toposort()
    nodes = {node.name: node for node in graph.nodes if node.domain == NAMESPACE}
    assert nodes.keys() == plugins.keys()
    op_types = {spec.qualified_name: spec.onnx_op_type for spec in all_specs().values()}
    assert {name: node.op for name, node in nodes.items()} == {
        name: op_types[plugin.target._schema.name] for name, plugin in plugins.items()
    }
    onnx.checker.check_model(gs.export_onnx(graph))


def test_polygraphy_shows_module_paths(decoder: Path) -> None:
    shown = polygraphy("inspect", "model", str(decoder), "--show", "layers", "attrs")
    assert "layers.0.linear_attn.gated_delta_rule" in shown
    assert "layers.1.self_attn.kv_cache_out" in shown
    assert "Q4eQsaAttention" in shown


def test_polygraphy_cuts_a_submodel(decoder: Path, tmp_path: Path) -> None:
    source, tensor = "layers.0.mlp_hyper_connection.hc_read.mixed", "layers.0.mlp.moe"
    part = tmp_path / "part.onnx"
    ends = ("--inputs", f"{source}:auto:auto", "--outputs", f"{tensor}:auto")
    polygraphy("surgeon", "extract", str(decoder), "-o", str(part), *ends)
    assert [node.name for node in onnx.load(part).graph.node] == [tensor]
