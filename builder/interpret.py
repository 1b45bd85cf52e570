"""Executes the ONNX that `builder.lower` writes: plugin nodes on the ``q4e`` ops, all others on torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import onnx
import torch
from onnx import helper
from torch import Tensor

from qwen4exp_trt.builder.onnx_graph import ONNX_DTYPES, TORCH_DTYPES, TRT_DOMAIN, tensor_from_proto
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.plugins.number_formats import (
    E2M1_VALUES,
    NVFP4_BLOCK,
    quantize_nvfp4_activations,
    unpack_e2m1,
)
from qwen4exp_trt.plugins.registry import plugin_specs
from qwen4exp_trt.plugins.spec import NAMESPACE, OpSpec


class OnnxProgram:
    """A lowered model that runs on torch tensors."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = model.graph
        self.constants = {proto.name: tensor_from_proto(proto) for proto in self.graph.initializer}

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Execute by name on metadata, states and weights; returns every graph output.

        States are updated in place, and their outputs are the same tensors, as in an engine.
        """
        missing = [value.name for value in self.graph.input if value.name not in inputs]
        if missing:
            raise BuildError(f"the ONNX model also needs the inputs {', '.join(missing)}")
        values = {**self.constants, **inputs}
        with torch.inference_mode():
            for node in self.graph.node:
                results = self._run_node(node, [values[name] for name in node.input])
                values.update(zip(node.output, results, strict=True))
        return {value.name: values[value.name] for value in self.graph.output}

    def _run_node(self, node: onnx.NodeProto, operands: list[Tensor]) -> Sequence[Tensor]:
        attrs = {attr.name: helper.get_attribute_value(attr) for attr in node.attribute}
        functions = node_functions()
        if (node.domain, node.op_type) not in functions:
            op = f"{node.domain or 'ai.onnx'}::{node.op_type}"
            raise BuildError(f"node {node.name}: the interpreter does not know the op {op}; add it to interpret.py")
        return functions[node.domain, node.op_type](operands, attrs)


NodeFunction = Callable[[Sequence[Tensor], Mapping[str, Any]], Sequence[Tensor]]
"""(operands, attributes) -> outputs. States among the operands are updated in place, and are the last outputs."""


@cache
def node_functions() -> dict[tuple[str, str], NodeFunction]:
    """What executes a node, by its domain and op type."""
    functions: dict[tuple[str, str], NodeFunction] = {}
    for spec in plugin_specs().values():
        functions[NAMESPACE, spec.onnx_op_type] = partial(_run_plugin, spec)
    for op, function in ONNX_TO_TORCH.items():
        domain, _, op_type = op.rpartition("::")
        functions[domain, op_type] = partial(_run_standard, function)
    return functions


def _run_standard(
    function: Callable[..., Tensor | Sequence[Tensor]], operands: Sequence[Tensor], attrs: Mapping[str, Any]
) -> Sequence[Tensor]:
    results = function(*operands, **attrs)
    return [results] if isinstance(results, Tensor) else results


def _run_plugin(spec: OpSpec, operands: Sequence[Tensor], attrs: Mapping[str, Any]) -> list[Tensor]:
    scalars = [_attr_value(attrs[attr.name]) for attr in spec.attrs]
    outputs = spec.overload(*operands, *scalars)
    states = [tensor for arg, tensor in zip(spec.inputs, operands, strict=True) if arg.mutated]
    return [*(outputs if isinstance(outputs, tuple) else (outputs,)), *states]


def _attr_value(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value


# --- standard ops ---------------------------------------------------------------------------------------------------


def _gather(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    return x.index_select(axis, indices)


def _gemm(a: Tensor, b: Tensor, bias: Tensor | None = None, *, transB: int) -> Tensor:
    return torch.nn.functional.linear(a, b if transB else b.T, bias)


def _unsqueeze(x: Tensor, axes: Tensor) -> Tensor:
    for axis in sorted(axes.tolist()):
        x = x.unsqueeze(axis)
    return x


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """ONNX division truncates integers; programs only divide floats."""
    assert a.is_floating_point()
    return a / b


def _dequantize_linear(x: Tensor, scale: Tensor, axis: int = -1, block_size: int = 0) -> Tensor:
    """With one scale, or with one for each block of the last dim."""
    assert axis == -1, axis
    values = torch.tensor(E2M1_VALUES)[unpack_e2m1(x).int()] if x.dtype == torch.float4_e2m1fn_x2 else x.float()
    return values * (scale.repeat_interleave(block_size, -1) if block_size else scale)


def _dynamic_quantize(x: Tensor, scale: Tensor, axis: int, block_size: int, scale_type: int) -> tuple[Tensor, Tensor]:
    assert (axis, block_size, scale_type) == (-1, NVFP4_BLOCK, ONNX_DTYPES[torch.float8_e4m3fn])
    packed, block_scales = quantize_nvfp4_activations(x, scale.item())
    return packed.view(torch.float4_e2m1fn_x2), block_scales


ONNX_TO_TORCH: dict[str, Callable[..., Tensor | Sequence[Tensor]]] = {
    "Add": torch.add,
    "Cast": lambda x, to: x.to(TORCH_DTYPES[to]),
    "Concat": lambda *parts, axis: torch.cat(parts, axis),
    "DequantizeLinear": _dequantize_linear,
    "Div": _divide,
    "Gather": _gather,
    "Gemm": _gemm,
    "Mul": torch.mul,
    "Reshape": lambda x, shape: x.reshape(shape.tolist()),
    "Sigmoid": torch.sigmoid,
    "Swish": torch.nn.functional.silu,
    "Unsqueeze": _unsqueeze,
    f"{TRT_DOMAIN}::TRT_FP4DynamicQuantize": _dynamic_quantize,
}
"""ONNX op (with its domain, unless it is a standard one) -> torch function of (operands, **attributes), for every op
that the lowering writes."""
