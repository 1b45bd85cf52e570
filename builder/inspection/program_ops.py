"""The ops of a program and their values, from its graph and the ONNX model that it was lowered to."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

import onnx
from onnx import TensorProto

from qwen4exp_trt.builder.inspection.document import Dim, OnnxNode, Value
from qwen4exp_trt.builder.onnx_graph import TORCH_DTYPES
from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.program import Program, is_getitem, path_from_identifier
from qwen4exp_trt.runtime.weights import name_from_dtype


def read_onnx(path: Path) -> onnx.ModelProto:
    """`BundleError` for a file that is no ONNX model."""
    try:
        model = onnx.load(path)
    except Exception as error:  # protobuf's DecodeError is not public
        raise BundleError(f"{path}: not an ONNX model: {error}; build the bundle again") from error
    if not model.graph.node:
        raise BundleError(f"{path}: an ONNX model without a node, as an empty file is; build the bundle again")
    return model


class ProgramOps:
    """The ONNX nodes and values of each op of ``program``, by its path.

    BundleError if the model was not lowered from the program.
    """

    def __init__(self, program: Program, model: onnx.ModelProto, where: Path) -> None:
        self._program, self._where = program, where
        self.paths = [path_from_identifier(node.name) for node in program.calls() if not is_getitem(node)]
        self._known = set(self.paths)
        self._states = {spec.out_name: spec.name for spec in program.states}
        self._constants = {initializer.name for initializer in model.graph.initializer}
        self._nodes: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in model.graph.node:
            self._nodes[self._path_of(node.name)].append(node)
        missing = [path for path in self.paths if path not in self._nodes]
        if missing:
            raise BundleError(
                f"{where}: has no node {missing[0]}, which the program beside it has; build the bundle again"
            )
        self.values = self._read_values(model.graph)

    def find_path(self, node_name: str) -> str | None:
        """The op that the ONNX node ``node_name`` is a part of; None for none."""
        while node_name and node_name not in self._known:
            node_name = node_name.rpartition(".")[0]
        return node_name or None

    def onnx_nodes(self, path: str) -> list[OnnxNode]:
        return [OnnxNode(name=node.name, op_type=node.op_type) for node in self._nodes[path]]

    def inputs(self, path: str) -> list[str]:
        """The values that the op reads, each once; an updated state goes by the state's name."""
        nodes = self._nodes[path]
        own = {name for node in nodes for name in node.output} | self._constants
        read = [self._states.get(name, name) for node in nodes for name in node.input if name and name not in own]
        return list(dict.fromkeys(read))

    def outputs(self, path: str) -> list[str]:
        return [name for name in self._nodes[path][-1].output if name not in self._states]

    def updates(self, path: str) -> list[str]:
        """The states that the op updates."""
        return [self._states[name] for name in self._nodes[path][-1].output if name in self._states]

    def _path_of(self, node_name: str) -> str:
        path = self.find_path(node_name)
        if path is None:
            raise BundleError(
                f"{self._where}: its node {node_name} is of no op of the program beside it; build the bundle again"
            )
        return path

    def _read_values(self, graph: onnx.GraphProto) -> dict[str, Value]:
        kinds = {spec.name: "input" for spec in self._program.inputs}
        kinds |= {spec.name: "state" for spec in self._program.states}
        kinds |= {spec.name: "weight" for spec in self._program.weights}
        made = {name for path in self.paths for name in self._nodes[path][-1].output}
        infos = [info for info in (*graph.input, *graph.value_info, *graph.output) if info.name not in self._states]
        known = {info.name: _value(info, kinds.get(info.name, "result")) for info in infos}
        return {name: value for name, value in known.items() if name in kinds or name in made}


def _value(info: onnx.ValueInfoProto, kind: str) -> Value:
    tensor = info.type.tensor_type
    shape: list[Dim] = [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]
    return Value(dtype=_dtype_name(tensor.elem_type), shape=shape, kind=kind)


def _dtype_name(elem_type: int) -> str:
    """Torch's name, but of one FP4 element, which ONNX counts, where torch's packed type is of two."""
    if elem_type not in TORCH_DTYPES:
        return TensorProto.DataType.Name(elem_type).lower()
    return name_from_dtype(TORCH_DTYPES[elem_type]).removesuffix("_x2")


def readers(inputs: Mapping[str, Iterable[str]]) -> dict[str, list[str]]:
    """Value -> the ops that read it, from op -> the values that it reads."""
    found: dict[str, list[str]] = defaultdict(list)
    for path, names in inputs.items():
        for name in names:
            found[name].append(path)
    return found
