"""The ONNX graph under construction, and the correspondence of torch and ONNX dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx
import torch
from onnx import TensorProto, helper
from torch import Tensor

from qwen4exp_trt.plugins.spec import NAMESPACE, element_shape
from qwen4exp_trt.runtime.specs import Dim

OPSET = 24
"""The first ONNX opset with Swish, which keeps SiLU one op with one rounding."""

PLUGIN_OPSET = 1

TRT_DOMAIN = "trt"
"""Of the ops that TensorRT's parser adds to the standard ones."""
TRT_OPSET = 1

ONNX_DTYPES = {
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.float32: TensorProto.FLOAT,
    torch.int32: TensorProto.INT32,
    torch.int64: TensorProto.INT64,
    torch.bool: TensorProto.BOOL,
    torch.float8_e4m3fn: TensorProto.FLOAT8E4M3FN,
    torch.float4_e2m1fn_x2: TensorProto.FLOAT4E2M1,
}
TORCH_DTYPES: dict[int, torch.dtype] = {onnx_dtype: dtype for dtype, onnx_dtype in ONNX_DTYPES.items()}


def tensor_from_proto(proto: TensorProto) -> Tensor:
    """An initializer as a torch tensor."""
    tensor = torch.frombuffer(bytearray(proto.raw_data), dtype=TORCH_DTYPES[proto.data_type])
    return tensor.reshape(tuple(proto.dims))


def proto_from_tensor(name: str, tensor: Tensor) -> TensorProto:
    """A torch tensor as an initializer."""
    assert tensor.dtype != torch.float4_e2m1fn_x2, f"{name}: packed FP4 is a network input, never a constant"
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return helper.make_tensor(name, ONNX_DTYPES[tensor.dtype], tuple(tensor.shape), raw, raw=True)


class OnnxGraph:
    """Nodes, constants and typed values in the order they were added."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.values: list[onnx.ValueInfoProto] = []

    def add_node(
        self, name: str, op_type: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attrs: Any
    ) -> None:
        self.nodes.append(helper.make_node(op_type, inputs, outputs, name=name, domain=domain, **attrs))

    def add_constant(self, name: str, tensor: Tensor) -> str:
        self.constants.append(proto_from_tensor(name, tensor))
        return name

    def to_model(self, name: str) -> onnx.ModelProto:
        graph = helper.make_graph(
            self.nodes, name, self.inputs, self.outputs, initializer=self.constants, value_info=self.values
        )
        versions = {"": OPSET, NAMESPACE: PLUGIN_OPSET, TRT_DOMAIN: TRT_OPSET}
        opsets = [helper.make_opsetid(domain, opset_version) for domain, opset_version in versions.items()]
        ir_version = helper.find_min_ir_version_for(opsets, ignore_unknown=True)
        return helper.make_model(graph, opset_imports=opsets, ir_version=ir_version, producer_name="qwen4exp-trt")


def value_info(name: str, dtype: torch.dtype, shape: Sequence[Dim]) -> onnx.ValueInfoProto:
    """The type of a value whose torch shape is ``shape``."""
    return helper.make_tensor_value_info(name, ONNX_DTYPES[dtype], element_shape(shape, dtype))
