"""What a loaded engine says of its layers beside the builder's report; the engines are simulated ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_stream import CpuStream
from trt_simulator import SimulatedTensorRT

from qwen4exp_trt.builder.inspection.document import Inspection
from qwen4exp_trt.builder.inspection.engine_inspector import merge_layers, read_layers, with_inspector
from qwen4exp_trt.builder.inspection.text import format_inspection
from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.tensorrt.module import load_trt
from qwen4exp_trt.runtime.tensorrt.session import Session

pytestmark = pytest.mark.trt

CPU = torch.device("cpu")


@pytest.fixture
def trt(engine_bundle: Path) -> SimulatedTensorRT:
    return SimulatedTensorRT(load_trt("tensorrt-rtx"), engine_bundle)


def make_stream(device: torch.device) -> CpuStream:
    return CpuStream()


def test_every_layer_is_found_by_its_name(
    inspection: Inspection, engine_bundle: Path, trt: SimulatedTensorRT, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, close = [], Session.close
    monkeypatch.setattr(Session, "close", lambda session: (closed.append(session), close(session)))
    merged = with_inspector(inspection, engine_bundle, CPU, make_stream, trt)
    for part in merged.parts:
        assert part.engine is not None and part.engine.layers
        assert part.engine.only_inspector == [] and part.engine.only_report == []
        for layer in part.engine.layers:
            told = layer.inspector
            assert told is not None and told["LayerType"] == layer.type
            marked = " [profile 1]" if layer.profile == "prefill" else ""
            assert told["Name"] == layer.name + marked
            assert [tensor["Name"] for tensor in told["Outputs"]] == [tensor.name for tensor in layer.outputs]
        count = len(part.engine.layers)
        assert f"{count} of {count} layers are in the loaded engine by the same name" in format_inspection(merged)
    assert len(closed) == 2  # before another is loaded: a GPU may have no room for both
    json.dumps(merged.to_json())


def test_layers_that_only_one_side_has_are_listed(inspection: Inspection) -> None:
    engine = inspection.parts[0].engine
    assert engine is not None
    conv = "layers.0.linear_attn.causal_conv1d"
    told = [{"Name": layer.name} for layer in engine.layers if layer.name != conv]
    merged = merge_layers(engine, [*told, {"Name": "a copy", "LayerType": "Reformat"}])
    assert merged.only_report == [f"{conv} (decode)", f"{conv} (prefill)"]
    assert merged.only_inspector == [{"Name": "a copy", "LayerType": "Reformat"}]
    part = replace(inspection.parts[0], engine=merged)
    text = format_inspection(replace(inspection, parts=[part]))
    assert f"only in the builder's report: {conv} (decode)" in text
    assert "only in the loaded engine: a copy (Reformat)" in text


def test_layers_of_one_name_go_by_their_profiles(inspection: Inspection) -> None:
    engine = inspection.parts[0].engine
    assert engine is not None
    same = [layer for layer in engine.layers if layer.name == "layers.0.linear_attn.causal_conv1d"]
    assert [layer.profile for layer in same] == ["decode", "prefill"]
    told = [{"Name": f"{same[0].name} [profile 1]"}, {"Name": same[0].name}]
    merged = merge_layers(replace(engine, layers=same), told)
    assert [layer.inspector for layer in merged.layers] == [told[1], told[0]]


def engine_that_says(text: str) -> Any:
    inspector = SimpleNamespace(get_engine_information=lambda format: text)
    return SimpleNamespace(create_engine_inspector=lambda: inspector)


def test_an_inspector_that_tells_names_alone(trt: SimulatedTensorRT) -> None:
    """That of an engine that was built without details."""
    engine = engine_that_says('{"Layers": ["first", "second"], "Bindings": []}')
    assert read_layers(trt, engine, Path("decoder.engine")) == [{"Name": "first"}, {"Name": "second"}]


@pytest.mark.parametrize("text", ["", "Layers:", "[1]", "{}"])
def test_an_inspector_that_tells_nothing(trt: SimulatedTensorRT, text: str) -> None:
    with pytest.raises(BundleError, match=r"decoder\.engine: the engine's inspector tells no layers as JSON"):
        read_layers(trt, engine_that_says(text), Path("decoder.engine"))


def test_a_bundle_without_engine_has_none_to_load(inspection: Inspection, float_bundle: Path) -> None:
    with pytest.raises(BundleError, match="has no engine to load"):
        with_inspector(inspection, float_bundle, CPU, make_stream)
