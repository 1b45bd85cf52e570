"""The engine's plugins themselves: made by their creators, asked for workspace, enqueued on bare addresses.

On a CPU the kernel emulator stands for `plugins.execute.execute`; all else of a plugin is what runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import numpy as np
import onnx
import torch
from cpu_stream import poison
from kernel_emulator import NUM_SMS, execute_emulated
from onnx import helper
from torch import Tensor

from qwen4exp_trt.builder.onnx_graph import TORCH_DTYPES
from qwen4exp_trt.plugins.kernels import NUM_SEMAPHORES
from qwen4exp_trt.plugins.spec import NAMESPACE, OpSpec, element_shape
from qwen4exp_trt.plugins.tensorrt import torch_dtypes
from trt_simulator.errors import SimulatorError
from trt_simulator.memory import ALIGNMENT, torch_shape

if TYPE_CHECKING:
    from trt_simulator.engine import EngineFile
    from trt_simulator.execution import Execution

_GUARD = 0xA5
_SHELL = "qwen4exp_trt.plugins.tensorrt"


class PluginFailure(Exception):
    """A plugin raised: TensorRT's bindings make a failed call of it, and TensorRT a failed execution."""


@dataclass
class _Node:
    plugin: Any
    workspace_bytes: list[int]
    """By profile."""
    shapes: Any = None
    """That it was last told of."""


class Plugins:
    """The plugins of an engine, as they are when it has been deserialized, by the names of their nodes."""

    def __init__(self, module: Any, file: EngineFile) -> None:
        self._module, self._file = module, file
        self._types = {dtype: found for found, dtype in torch_dtypes(module.real).items()}
        self._values = _values(file.program.graph)
        self._nodes = {
            node.name: self._make(node, spec)
            for node in file.program.graph.node
            if (spec := file.program.plugin_of(node)) is not None
        }

    def attach_to_context(self) -> AttachedPlugins:
        nodes = {
            name: _Node(node.plugin.attach_to_context(None), node.workspace_bytes) for name, node in self._nodes.items()
        }
        return AttachedPlugins(self._module, self._types, self._values, nodes)

    def _make(self, node: onnx.NodeProto, spec: OpSpec) -> _Node:
        """From the node's attributes, as at the build; then again from what the engine stores of it."""
        trt = self._module.real
        creator = self._module.get_plugin_registry().get_creator(node.op_type, str(spec.version), NAMESPACE)
        attrs = {attr.name: helper.get_attribute_value(attr) for attr in node.attribute}
        arrays = {field.name: _field_array(attrs[field.name]) for field in creator.field_names}
        fields = [trt.PluginField(each.name, arrays[each.name], each.type) for each in creator.field_names]
        built = creator.create_plugin(node.name, trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)
        sizes = [self._workspace_bytes(built, node, profile) for profile in range(len(self._file.profiles))]
        stored = built.get_fields_to_serialize()
        return _Node(creator.create_plugin(node.name, stored, trt.TensorRTPhase.RUNTIME), sizes)

    def _workspace_bytes(self, plugin: Any, node: onnx.NodeProto, profile: int) -> int:
        extents: dict[str, tuple[int, int, int]] = {}
        for name in self._file.inputs:
            ranges = self._file.shape_range(profile, name)
            extents |= {dim: r for dim, *r in zip(self._file.dims[name], *ranges, strict=True) if isinstance(dim, str)}  # type: ignore[misc]
        descs = [self._dynamic_desc(name, extents) for name in (*node.input, *node.output)]
        inputs, outputs = descs[: len(node.input)], descs[len(node.input) :]
        plugin.configure_plugin(inputs, outputs)
        return plugin.get_workspace_size(inputs, outputs)

    def _dynamic_desc(self, name: str, extents: Mapping[str, Sequence[int]]) -> Any:
        dtype, dims = self._values[name]
        made = self._module.real.DynamicPluginTensorDesc()
        static = [-1 if isinstance(dim, str) else dim for dim in dims]
        made.desc = tensor_desc(self._module.real, self._types[dtype], static)
        for index, part in enumerate(("min", "opt", "max")):
            shape = [extents[dim][index] if isinstance(dim, str) else dim for dim in dims]
            setattr(made, part, self._module.real.Dims(shape))
        return made


@dataclass
class AttachedPlugins:
    """The plugins of one execution context."""

    module: Any
    types: Mapping[torch.dtype, Any]
    values: Mapping[str, tuple[torch.dtype, list[int | str]]]
    nodes: Mapping[str, _Node]
    _semaphores: dict[torch.device, Tensor] = field(default_factory=dict)

    def runner(self, execution: Execution) -> Any:
        """What runs a plugin node within ``execution``."""
        extents = {
            dim: extent
            for name, shape in execution.shapes.items()
            for dim, extent in zip(execution.file.dims[name], shape, strict=True)
            if isinstance(dim, str)
        }

        def run(node: onnx.NodeProto, spec: OpSpec, operands: list[Tensor]) -> list[Tensor]:
            known, device = self.nodes[node.name], operands[0].device
            names = node.output[: len(spec.outputs)]
            outputs = [_Guarded.make(*self._value(name, extents), device) for name in names]
            workspace = _Guarded.make(torch.uint8, [known.workspace_bytes[execution.profile]], device)
            given = [operand.contiguous() for operand in operands]
            self._enqueue(known, spec, given, [output.tensor for output in outputs], workspace)
            for memory, what in zip([*outputs, workspace], [*names, "its workspace"], strict=True):
                memory.check(f"{node.name} writes beyond {what}")
            states = [tensor for arg, tensor in zip(spec.inputs, operands, strict=True) if arg.mutated]
            return [*(output.tensor for output in outputs), *states]

        return run

    def _value(self, name: str, extents: Mapping[str, int]) -> tuple[torch.dtype, list[int]]:
        dtype, dims = self.values[name]
        return dtype, [extents[dim] if isinstance(dim, str) else dim for dim in dims]

    def _enqueue(
        self, known: _Node, spec: OpSpec, operands: list[Tensor], outputs: list[Tensor], workspace: _Guarded
    ) -> None:
        states = [tensor for arg, tensor in zip(spec.inputs, operands, strict=True) if arg.mutated]
        read = [tensor for arg, tensor in zip(spec.inputs, operands, strict=True) if not arg.mutated]
        descs = [[self._desc(tensor) for tensor in part] for part in (operands, [*outputs, *states])]
        shapes = [tuple(desc.dims) for desc in descs[0]]
        device = operands[0].device
        before = None if device.type == "cuda" else [tensor.clone() for tensor in read]
        try:
            if shapes != known.shapes:
                known.plugin.on_shape_change(*descs)
                known.shapes = shapes
            pointers = [[tensor.data_ptr() for tensor in part] for part in (operands, [*outputs, *states])]
            with on_host() if device.type == "cpu" else on_gpu(device) as stream:
                known.plugin.enqueue(*descs, *pointers, workspace.tensor.data_ptr(), stream)
        except (SimulatorError, AssertionError):
            raise
        except Exception as error:
            raise PluginFailure(f"{spec.onnx_op_type}: {type(error).__name__}: {error}") from error
        for tensor, old in zip(read, before or (), strict=False):
            if not torch.equal(tensor.reshape(-1).view(torch.uint8), old.reshape(-1).view(torch.uint8)):
                raise SimulatorError(f"{spec.name} writes an operand that is no state")

    def _desc(self, tensor: Tensor) -> Any:
        return tensor_desc(self.module.real, self.types[tensor.dtype], element_shape(tensor.shape, tensor.dtype))


def tensor_desc(trt: Any, dtype: Any, shape: Sequence[int]) -> Any:
    made = trt.PluginTensorDesc()
    made.dims, made.type, made.format = trt.Dims(list(shape)), dtype, trt.TensorFormat.LINEAR
    return made


@dataclass
class _Guarded:
    """Memory with bytes around it that nobody may write."""

    memory: Tensor
    tensor: Tensor

    @classmethod
    def make(cls, dtype: torch.dtype, elements: Sequence[int], device: torch.device) -> _Guarded:
        shape = torch_shape(dtype, elements)
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        memory = torch.full((size + 3 * ALIGNMENT,), _GUARD, dtype=torch.uint8, device=device)
        start = ALIGNMENT + -memory.data_ptr() % ALIGNMENT
        tensor = memory[start : start + size].view(dtype).view(shape)
        poison(tensor)
        return cls(memory, tensor)

    def check(self, what: str) -> None:
        """Of a GPU only what has run is seen, and nothing during a capture."""
        if self.memory.is_cuda and torch.cuda.is_current_stream_capturing():
            return
        start = self.tensor.data_ptr() - self.memory.data_ptr()
        rest = torch.cat([self.memory[:start], self.memory[start + self.tensor.nbytes :]])
        if not (rest == _GUARD).all():
            raise SimulatorError(what)


_semaphores = torch.zeros(NUM_SEMAPHORES, dtype=torch.int32)


@contextmanager
def on_host() -> Iterator[int]:
    """A block in which plugins launch their kernels in the emulator, as on a GPU of a few multiprocessors."""

    def execute(plan: Any, pointers: Any, scratch: int, counters: int, *where: int) -> None:
        execute_emulated(plan, pointers, scratch=scratch, semaphores=counters)

    with (
        patch(f"{_SHELL}.execute", execute),
        patch(f"{_SHELL}.num_multiprocessors", lambda device: NUM_SMS),
        patch(f"{_SHELL}.semaphores", lambda device: _semaphores),
        patch("torch.cuda.current_device", lambda: 0),
    ):
        yield 0


@contextmanager
def on_gpu(device: torch.device) -> Iterator[int]:
    yield torch.cuda.current_stream(device).cuda_stream


def _field_array(value: Any) -> np.ndarray:
    """As the parser makes it of an attribute: a text ends with NUL."""
    if isinstance(value, bytes):
        return np.frombuffer(value + b"\0", np.int8)
    return np.atleast_1d(np.asarray(value, np.float32 if isinstance(value, float) else np.int32))


def _values(graph: onnx.GraphProto) -> dict[str, tuple[torch.dtype, list[int | str]]]:
    """Dtype and dims of every value of the graph, in elements."""
    found: dict[str, tuple[torch.dtype, list[int | str]]] = {}
    for value in (*graph.input, *graph.output, *graph.value_info):
        tensor = value.type.tensor_type
        dims = [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in tensor.shape.dim]
        found[value.name] = TORCH_DTYPES[tensor.elem_type], dims
    return found | {proto.name: (TORCH_DTYPES[proto.data_type], list(proto.dims)) for proto in graph.initializer}
