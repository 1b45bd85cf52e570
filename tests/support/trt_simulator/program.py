"""The engine's ONNX on the CPU bodies of its ops, with what else is to be known of the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx
import torch
from torch import Tensor

from qwen4exp_trt.builder.interpret import OnnxProgram
from qwen4exp_trt.plugins.registry import plugin_specs
from qwen4exp_trt.plugins.spec import NAMESPACE, OpSpec

PluginRunner = Callable[[onnx.NodeProto, OpSpec, list[Tensor]], Sequence[Tensor]]


class SimulatedProgram(OnnxProgram):
    """Runs an ONNX model on any device, its plugin nodes by ``run_plugin`` if that is given."""

    def __init__(self, model: onnx.ModelProto) -> None:
        super().__init__(model)
        self._specs = {spec.onnx_op_type: spec for spec in plugin_specs().values()}
        self._of_device: dict[torch.device, dict[str, Tensor]] = {}

    def run_on(
        self, device: torch.device, inputs: Mapping[str, Tensor], run_plugin: PluginRunner | None = None
    ) -> dict[str, Tensor]:
        """As `run`, for ``inputs`` on ``device``."""
        values = {**self._constants_on(device), **inputs}
        with torch.inference_mode():
            for node in self.graph.node:
                operands = [values[name] for name in node.input]
                spec = self.plugin_of(node)
                if spec is not None and run_plugin is not None:
                    results = run_plugin(node, spec, operands)
                else:
                    results = self._run_node(node, operands)
                values.update(zip(node.output, results, strict=True))
        return {value.name: values[value.name] for value in self.graph.output}

    def plugin_of(self, node: onnx.NodeProto) -> OpSpec | None:
        return self._specs.get(node.op_type) if node.domain == NAMESPACE else None

    def aliases(self) -> dict[str, str]:
        """Graph output -> the graph input whose memory it is, through any number of plugins that update it."""
        source = {value.name: value.name for value in self.graph.input}
        for node in self.graph.node:
            spec = self.plugin_of(node)
            if spec is None:
                continue
            operands = [name for name, arg in zip(node.input, spec.inputs, strict=True) if arg.mutated]
            for name, operand in zip(node.output[len(spec.outputs) :], operands, strict=True):
                source[name] = source[operand]
        return {value.name: source[value.name] for value in self.graph.output if value.name in source}

    def _constants_on(self, device: torch.device) -> dict[str, Tensor]:
        """Shapes and axes stay on the CPU, where they are read."""
        if device.type == "cpu":
            return self.constants
        if device not in self._of_device:
            self._of_device[device] = {
                name: value if value.dtype == torch.int64 else value.to(device)
                for name, value in self.constants.items()
            }
        return self._of_device[device]
