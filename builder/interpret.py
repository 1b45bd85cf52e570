"""Executes the ONNX that `builder.lower` writes: standard ops on torch, plugin nodes on the ``q4e`` ops themselves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx
import torch
from onnx import helper
from torch import Tensor

from qwen4exp_trt.builder.onnx_graph import TORCH_DTYPES, tensor_from_proto
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.spec import NAMESPACE, OpSpec


class OnnxProgram:
    """A lowered model that runs on torch tensors."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self.graph = model.graph
        self.constants = {proto.name: tensor_from_proto(proto) for proto in self.graph.initializer}
        self.plugins = {spec.onnx_op_type: spec for spec in all_specs().values()}

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
        if node.domain == NAMESPACE and node.op_type in self.plugins:
            return _run_plugin(self.plugins[node.op_type], operands, attrs)
        if node.domain or node.op_type not in ONNX_TO_TORCH:
            op = f"{node.domain or 'ai.onnx'}::{node.op_type}"
            raise BuildError(f"node {node.name}: the interpreter does not know the op {op}; add it to interpret.py")
        results = ONNX_TO_TORCH[node.op_type](*operands, **attrs)
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


ONNX_TO_TORCH: dict[str, Callable[..., Tensor | Sequence[Tensor]]] = {
    "Add": torch.add,
    "Cast": lambda x, to: x.to(TORCH_DTYPES[to]),
    "Concat": lambda *parts, axis: torch.cat(parts, axis),
    "Div": _divide,
    "Gather": _gather,
    "Gemm": _gemm,
    "Mul": torch.mul,
    "Reshape": lambda x, shape: x.reshape(shape.tolist()),
    "Sigmoid": torch.sigmoid,
    "Swish": torch.nn.functional.silu,
    "Unsqueeze": _unsqueeze,
}
"""ONNX op -> torch function of (operands, **attributes), for every op that the lowering writes."""
