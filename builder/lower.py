"""Lowers a `Program` to ONNX: ATen and native ops by their tables, other ``q4e`` ops to plugin nodes, mutated states to
aliased outputs.

A state is a graph input. The node that updates it gets one more output, the updated state, which TensorRT aliases to
the input; whoever reads the state later reads that output. Weights are graph inputs too: a model holds
shape constants only.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import onnx
import torch
from torch import fx

from qwen4exp_trt.builder.aten_ops import ATEN_TO_ONNX, Site
from qwen4exp_trt.builder.native_ops import NATIVE_TO_ONNX
from qwen4exp_trt.builder.onnx_graph import OnnxGraph, value_info
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.plugins.registry import spec_of
from qwen4exp_trt.plugins.spec import NAMESPACE, OpSpec
from qwen4exp_trt.runtime.program import Program, is_getitem, path_from_identifier
from qwen4exp_trt.runtime.specs import Dim, TensorSpec
from qwen4exp_trt.runtime.weights import dtype_from_name


def lower_program(program: Program, debug_outputs: Sequence[TensorSpec] = ()) -> onnx.ModelProto:
    """The ONNX model of a traced or transformed program (its nodes carry fake tensors).

    Inputs and outputs are named as in the tables (an updated state `StateSpec.out_name`), nodes and values by their
    module paths, dynamic dims as in the tables. ``debug_outputs`` are intermediate values, by `value_names`, that
    become outputs behind the others. Raises BuildError for an op outside the table, a state that not
    exactly one op updates, and a state that another op reads before.
    """
    return _ProgramLowering(program, debug_outputs).lower()


class _ProgramLowering:
    def __init__(self, program: Program, debug_outputs: Sequence[TensorSpec]) -> None:
        self.program, self.debug_outputs, self.graph = program, debug_outputs, OnnxGraph()
        self.dim_names = program.dim_names()
        self.value_names = value_names(program)
        placeholders = program.placeholders()
        self.states = {placeholders[spec.name]: spec for spec in program.states}
        self.readers: dict[str, list[str]] = defaultdict(list)
        self.versions = {node: spec.name for node, spec in self.states.items()}

    def lower(self) -> onnx.ModelProto:
        for spec in (*self.program.inputs, *self.program.states, *(w.tensor for w in self.program.weights)):
            self.graph.inputs.append(value_info(spec.name, dtype_from_name(spec.dtype), spec.shape))
        for node in self.program.calls():
            if not is_getitem(node):
                self._lower_call(node)
        for spec in self.program.outputs:
            self.graph.outputs.append(value_info(spec.name, dtype_from_name(spec.dtype), spec.shape))
        for spec in self.program.states:
            self.graph.outputs.append(value_info(spec.out_name, dtype_from_name(spec.dtype), spec.shape))
        for spec in self.debug_outputs:
            self.graph.outputs.append(value_info(spec.name, dtype_from_name(spec.dtype), spec.shape))
        self._check_state_updates()
        return self.graph.to_model("decoder")

    def _lower_call(self, node: fx.Node) -> None:
        path = path_from_identifier(node.name)
        spec = spec_of(node.target)
        outputs = self._declare_values(node)
        if spec is not None and not spec.is_native:
            self._lower_plugin(node, path, spec, outputs)
            return
        lowering = ATEN_TO_ONNX.get(node.target) if spec is None else NATIVE_TO_ONNX[spec.name]
        if lowering is None:
            raise BuildError(
                f"{path}: the op {node.target} cannot be lowered to ONNX; rewrite it in a pass, or add it to "
                f"runtime/program_text.py, builder/aten_ops.py and builder/interpret.py"
            )
        site = Site(self.graph, node, path, outputs, lambda operand: self._read(operand, path))
        lowering(site, *node.args, **node.kwargs)

    def _lower_plugin(self, node: fx.Node, path: str, spec: OpSpec, outputs: list[str]) -> None:
        operands, attrs = spec.split_args(node.args)
        inputs = [self._read(operand, path) for operand in operands.values()]
        for arg in spec.states:
            outputs.append(self._write(operands[arg.name], path))
        attrs["plugin_version"] = str(spec.version)
        self.graph.add_node(path, spec.onnx_op_type, inputs, outputs, domain=NAMESPACE, **attrs)

    def _read(self, operand: fx.Node, path: str) -> str:
        """The value that a node at ``path`` reads: of a state, its newest version."""
        if operand not in self.states:
            return self.value_names[operand][0]
        version = self.versions[operand]
        self.readers[version].append(path)
        return version

    def _write(self, state: fx.Node, path: str) -> str:
        """The name of the updated ``state`` that the node at ``path`` makes."""
        if state not in self.states:
            raise BuildError(f"{path} updates {state}, which is not a state")
        if self.versions[state] == self.states[state].out_name:
            raise BuildError(f"{path} updates state {self.states[state].name}, which another op has updated before")
        self.versions[state] = self.states[state].out_name
        return self.versions[state]

    def _declare_values(self, node: fx.Node) -> list[str]:
        """The names of the node's values, whose types are noted unless they are outputs, typed there, or sizes."""
        names, values = self.value_names[node], node.meta["val"]
        values = values if isinstance(values, (tuple, list)) else [values]
        output_names = {spec.name for spec in (*self.program.outputs, *self.debug_outputs)}
        for name, value in zip(names, values, strict=True):
            if isinstance(value, torch.Tensor) and name not in output_names:
                self.graph.values.append(value_info(name, value.dtype, [self._dim(e) for e in value.shape]))
        return list(names)

    def _dim(self, extent: Any) -> Dim:
        """A named dim, or a product of one such as ``4*T``."""
        if isinstance(extent, int):
            return extent
        return re.sub(r"\w+", lambda symbol: self.dim_names.get(symbol[0], symbol[0]), str(extent))

    def _check_state_updates(self) -> None:
        """TensorRT updates a state in place only if one node updates it and nobody else reads the old value."""
        for state, spec in self.states.items():
            if self.versions[state] != spec.out_name:
                raise BuildError(f"state {spec.name} is updated by no op; drop it from the program's states")
            readers = self.readers[spec.name]
            if len(readers) != 1:
                raise BuildError(
                    f"state {spec.name} is read by {', '.join(readers)} before it is updated; the op that updates it "
                    f"must be the only one, so let the others read the state after the update"
                )


def value_names(program: Program) -> dict[fx.Node, list[str]]:
    """Every node's values: what the tables call it, else its path. The values of an op with several outputs are named
    after the nodes that take them, which share the names."""
    names = {node: [path_from_identifier(node.name)] for node in program.graph.nodes}
    results = program.graph.output_node().args[0]
    assert isinstance(results, (tuple, list)) and len(set(results)) == len(program.outputs)
    for node, spec in zip(results, program.outputs, strict=True):
        assert isinstance(node, fx.Node) and node.op == "call_function", f"output {spec.name} is computed by no op"
        names[node] = [spec.name]
    for node in program.calls():
        if isinstance(node.meta["val"], (tuple, list)):
            takers = {user.args[1]: user for user in reversed(node.users)}
            path = path_from_identifier(node.name)
            names[node] = [
                names[takers[index]][0] if index in takers else f"{path}.{index}"
                for index in range(len(node.meta["val"]))
            ]
            for user in node.users:
                names[user] = [names[node][user.args[1]]]  # type: ignore[index]
    return names
