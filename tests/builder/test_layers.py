"""Reading TensorRT's layer report."""

from __future__ import annotations

from qwen4exp_trt.builder.layers import layer_report

LOG = (
    "Max Scratch Memory: 256 bytes",
    "Total Activation Memory: 1024 bytes",
    "Max Scratch Memory: 512 bytes",
    "Total Activation Memory: 4096 bytes",
    "Total Weights Memory: 132 bytes",
    """Layers:
Name: __mye23_myl0_0, LayerType: shape_call, Inputs: [], Constants: [], Outputs: [], TacticName: , StreamId: 0, Metadata: 
Name: __myl_SigmMul_myl0_1, LayerType: kgen, Inputs: [ { Name: x, Dimensions: [-1,64], Strides: [64,1], StrideOrder: [1,0], Datatype: BFloat16, Format: (Linear) Row major linear format }, { Name: y, Dimensions: [64], Strides: [1], StrideOrder: [0], Datatype: Float, Format: (Linear) Row major linear format }], Constants: [ { Name: c, Dimensions: [1], Strides: [1], StrideOrder: [0], Datatype: Float, Format: (Linear) Row major linear format }], Outputs: [ { Name: a, Dimensions: [-1,64], Strides: [64,1], StrideOrder: [1,0], Datatype: BFloat16, Format: (Linear) Row major linear format }], TacticName: __myl_SigmMul_0x74bb, StreamId: 0, Metadata: [ONNX Layer: layers.0.sigmoid][ONNX Layer: layers.0.mul]
Name: layers.0.conv, LayerType: PluginV3, Inputs: [ { Name: a, Location: Device, Dimensions: [-1,64], Datatype: BFloat16, Format: Format not available due to dynamic shapes }], Outputs: [ { Name: out, Location: Device, Dimensions: [-1,48], Datatype: BFloat16, Format: none }, { Name: state_out, Location: Device, Dimensions: [-1,3,48], Datatype: Int32, Format: none }], PluginType: Q4eConv, PluginVersion: "1", PluginMetadata: "[none]", TacticValue: 0x0000000000000000, StreamId: 0, Metadata: [ONNX Layer: layers.0.conv]
Name: __mye23_myl3_0, LayerType: shape_call, Inputs: [], Constants: [], Outputs: [], TacticName: , StreamId: 0, Metadata: 
Name: __myl_SigmMul_myl3_1, LayerType: kgen, Inputs: [ { Name: x [profile 1], Dimensions: [-1,64], Datatype: BFloat16, Format: f }], Constants: [], Outputs: [ { Name: a [profile 1], Dimensions: [-1,64], Datatype: BFloat16, Format: f }], TacticName: t, StreamId: 0, Metadata: [ONNX Layer: layers.0.sigmoid]
Name: layers.0.conv [profile 1], LayerType: PluginV3, Inputs: [], Outputs: [], PluginType: Q4eConv, TacticValue: 0x0, StreamId: 0, Metadata: [ONNX Layer: layers.0.conv]
A line of another form

I/O Tensors:
 Name: x, IOMode: Input, DataType: BFloat16, Dimensions: [-1,64], Location: Device, IsShapeInferenceIO: false, ProfileInfo: [ { MinShape: [1,64] }]
 Name: num_seqs, IOMode: Input, DataType: Int32, Dimensions: [1], Location: Device, IsShapeInferenceIO: false, ProfileInfo: []
 Name: out, IOMode: Output, DataType: BFloat16, Dimensions: [-1,48], Location: Device, IsShapeInferenceIO: false, ProfileInfo: []

Engine Metadata:
 Multi-Device: Disabled""",  # noqa: E501
)


def tensor(name: str, dtype: str, *dims: int) -> dict[str, object]:
    return {"name": name, "dtype": dtype, "dims": list(dims)}


def test_layers_and_their_tensors_are_read() -> None:
    report = layer_report(LOG, ["decode", "prefill"])
    assert report["layers"][1] == {
        "name": "__myl_SigmMul_myl0_1",
        "type": "kgen",
        "profile": "decode",
        "inputs": [tensor("x", "BFloat16", -1, 64), tensor("y", "Float", 64)],
        "outputs": [tensor("a", "BFloat16", -1, 64)],
        "modules": ["layers.0.sigmoid", "layers.0.mul"],
        "tactic": "__myl_SigmMul_0x74bb",
    }
    plugin = report["layers"][2]
    assert (plugin["plugin"], plugin["modules"]) == ("Q4eConv", ["layers.0.conv"])
    assert plugin["outputs"] == [tensor("out", "BFloat16", -1, 48), tensor("state_out", "Int32", -1, 3, 48)]


def test_layers_know_their_profile() -> None:
    """A layer inside a fused group carries no mark of its own, and marks are no part of names."""
    layers = layer_report(LOG, ["decode", "prefill"])["layers"]
    assert [layer["profile"] for layer in layers] == ["decode"] * 3 + ["prefill"] * 3
    assert layers[5]["name"] == "layers.0.conv"
    assert layers[4]["inputs"][0]["name"] == "x"


def test_engine_tensors_and_memory_are_read() -> None:
    report = layer_report(LOG, ["decode", "prefill"])
    assert report["io_tensors"] == [
        tensor("x", "BFloat16", -1, 64) | {"mode": "input"},
        tensor("num_seqs", "Int32", 1) | {"mode": "input"},
        tensor("out", "BFloat16", -1, 48) | {"mode": "output"},
    ]
    assert report["activation_bytes"] == {"decode": 1024, "prefill": 4096}
    assert report["scratch_bytes"] == {"decode": 256, "prefill": 512}
    assert report["constant_bytes"] == 132


def test_a_line_of_an_unknown_form_is_kept() -> None:
    assert layer_report(LOG, ["decode", "prefill"])["unread"] == ["A line of another form"]


def test_a_log_without_a_report_gives_an_empty_one() -> None:
    report = layer_report(["something else"], ["decode"])
    assert (report["layers"], report["activation_bytes"], report["constant_bytes"]) == ([], {}, None)
