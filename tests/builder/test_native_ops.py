"""Ops that TensorRT's own layers compute: their ONNX form, executed, and what TensorRT makes of it."""

from __future__ import annotations

from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from tiny_programs import sample_steps, trace
from torch import Tensor, nn

from qwen4exp_trt.builder.engine import build_engine
from qwen4exp_trt.builder.interpret import OnnxProgram
from qwen4exp_trt.builder.lower import lower_program
from qwen4exp_trt.builder.native_ops import NATIVE_TO_ONNX
from qwen4exp_trt.builder.profiles import ShapeRange
from qwen4exp_trt.plugins.registry import all_specs, plugin_specs
from qwen4exp_trt.plugins.sample_batches import sample_nvfp4
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.specs import TensorSpec
from qwen4exp_trt.runtime.tensorrt.module import load_trt

Q4E: Any = torch.ops.q4e
N, K, PARTS = 192, 128, 3
INPUT_SCALE = torch.tensor(8 / (6 * 448)).item()
PROFILES = {
    "decode": {"x": ShapeRange((1, K), (1, K), (8, K))},
    "prefill": {"x": ShapeRange((1, K), (512, K), (512, K))},
}


class Projection(nn.Module):
    """Three merged projections, each with its own global scale, between two other ops."""

    def __init__(self) -> None:
        super().__init__()
        weight, block_scales, scales = sample_nvfp4(torch.Generator().manual_seed(0), N, K, PARTS)
        self.register_buffer("weight", weight)
        self.register_buffer("block_scales", block_scales)
        self.register_buffer("alpha", scales.repeat_interleave(N // PARTS) * INPUT_SCALE)

    def forward(self, x: Tensor, _: Any) -> Tensor:
        return Q4E.nvfp4_w4a4_linear(x * 2, self.weight, self.block_scales, self.alpha, INPUT_SCALE) * 2


def program_of(dtype: str) -> Program:
    return trace(Projection(), (TensorSpec("x", ("T", K), dtype),))


def weights() -> dict[str, Tensor]:
    return dict(Projection().named_buffers())


def test_every_native_op_has_a_lowering() -> None:
    assert NATIVE_TO_ONNX.keys() == all_specs().keys() - plugin_specs().keys() != set()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_onnx_equals_program(dtype: torch.dtype) -> None:
    """Bitwise."""
    program = program_of(str(dtype).removeprefix("torch."))
    model = onnx.load_from_string(lower_program(program).SerializeToString())
    onnx.checker.check_model(model, full_check=True)
    interpreter = OnnxProgram(model)
    for inputs in sample_steps(program).steps:
        x = inputs["x"].to(dtype)
        x[0, 16:32] = 0
        expected = program.run({"x": x}, {}, weights())["out_0"]
        found = interpreter.run({"x": x, **weights()})["out_0"]
        assert found.dtype == dtype and torch.equal(found, expected)


def test_no_node_is_a_plugin_and_nothing_but_scalars_is_constant() -> None:
    graph = lower_program(program_of("bfloat16")).graph
    ops = [f"{node.domain}::{node.op_type}" for node in graph.node]
    assert ops == [
        "::Mul",
        "trt::TRT_FP4DynamicQuantize",
        *["::DequantizeLinear"] * 4,
        "::Gemm",
        "::Mul",
        "::Cast",
        "::Mul",
    ]
    assert all(node.name.startswith("nvfp4_w4a4_linear") for node in graph.node[1:-1])
    constants = {proto.name: proto for proto in graph.initializer}
    assert not any(proto.dims for proto in constants.values())
    scale = constants["nvfp4_w4a4_linear.input_scale"]
    assert torch.frombuffer(bytearray(scale.raw_data), dtype=torch.float32).item() == INPUT_SCALE


def layers_of(model: onnx.ModelProto) -> list[dict[str, Any]]:
    return build_engine(load_trt("tensorrt-rtx"), model, PROFILES, "sm121").layers["layers"]


def fp4_gemms(layers: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Profile and output dtype of each GEMM that reads two FP4 operands and the block scales of both."""
    return [
        (layer["profile"], layer["outputs"][0]["dtype"])
        for layer in layers
        if layer["type"] == "gemm" and sorted(t["dtype"] for t in layer["inputs"]) == ["FP4E2M1"] * 2 + ["FP8"] * 2
    ]


def written_weights(layers: list[dict[str, Any]]) -> list[str]:
    """The layers that write a tensor of the weight's shape."""
    return [layer["name"] for layer in layers if any(sorted(t["dims"]) == [K, N] for t in layer["outputs"])]


@pytest.mark.trt
def test_tensorrt_makes_an_fp4_gemm_of_it() -> None:
    """In both profiles, from weights that are network inputs; it writes float32, and no layer writes the weight."""
    layers = layers_of(lower_program(program_of("bfloat16")))
    assert fp4_gemms(layers) == [("decode", "Float"), ("prefill", "Float")]
    assert written_weights(layers) == []


@pytest.mark.trt
def test_tensorrt_writes_out_the_weight_if_a_scale_in_front_of_the_gemm_is_an_input() -> None:
    """Why ``alpha`` comes behind it. Also the control of the test before."""
    model = lower_program(program_of("bfloat16"))
    (dequantize,) = [node for node in model.graph.node if node.name == "nvfp4_w4a4_linear.w_scales"]
    dequantize.input[1] = "scale"
    model.graph.input.append(helper.make_tensor_value_info("scale", TensorProto.FLOAT, []))
    layers = layers_of(model)
    assert fp4_gemms(layers) == []
    assert written_weights(layers) != []
