"""The TensorRT side of every op that is a plugin: it and its creator derived from its `OpSpec`.

The TensorRT module (``tensorrt`` or ``tensorrt_rtx``) is a value: nothing here imports it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from types import ModuleType
from typing import Any

import numpy as np
import torch

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.cuda_body import cached_plan, semaphores
from qwen4exp_trt.plugins.execute import execute, num_multiprocessors
from qwen4exp_trt.plugins.kernels import MAX_SMS, Plan
from qwen4exp_trt.plugins.registry import plugin_specs
from qwen4exp_trt.plugins.spec import NAMESPACE, OpSpec, TensorArg, dtypes_of

_NOT_ALIASED = -1
_FIELD_TYPES = {"int": "INT32", "int[]": "INT32", "float": "FLOAT32", "str": "CHAR"}
_TRT_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float32: "FLOAT",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float8_e4m3fn: "FP8",
    torch.float4_e2m1fn_x2: "FP4",
}


class DimExpression:
    """A TensorRT dimension expression with Python's arithmetic, so that `plugins.dims` evaluates over it."""

    def __init__(self, trt: ModuleType, builder: Any, expression: Any) -> None:
        self.trt, self.builder, self.expression = trt, builder, expression

    def __repr__(self) -> str:
        return str(self.expression.get_constant_value()) if self.expression.is_constant() else "?"

    def _apply(self, operation: str, left: Any, right: Any) -> DimExpression:
        operands = (dim_expression(self.trt, self.builder, value).expression for value in (left, right))
        result = self.builder.operation(getattr(self.trt.DimensionOperation, operation), *operands)
        return DimExpression(self.trt, self.builder, result)

    def __add__(self, other: Any) -> DimExpression:
        return self._apply("SUM", self, other)

    def __radd__(self, other: Any) -> DimExpression:
        return self._apply("SUM", other, self)

    def __sub__(self, other: Any) -> DimExpression:
        return self._apply("SUB", self, other)

    def __rsub__(self, other: Any) -> DimExpression:
        return self._apply("SUB", other, self)

    def __mul__(self, other: Any) -> DimExpression:
        return self._apply("PROD", self, other)

    def __rmul__(self, other: Any) -> DimExpression:
        return self._apply("PROD", other, self)

    def __floordiv__(self, other: Any) -> DimExpression:
        return self._apply("FLOOR_DIV", self, other)

    def __rfloordiv__(self, other: Any) -> DimExpression:
        return self._apply("FLOOR_DIV", other, self)


def dim_expression(trt: ModuleType, builder: Any, value: Any) -> DimExpression:
    """``value`` (an int, a TensorRT expression or one of ours) as one of ours."""
    if isinstance(value, DimExpression):
        return value
    return DimExpression(trt, builder, builder.constant(value) if isinstance(value, int) else value)


# --- attributes <-> plugin fields -----------------------------------------------------------------------------------


class AttrFields:
    """The attributes of a plugin as a PluginFieldCollection, and the memory that its fields point to."""

    def __init__(self, trt: ModuleType, spec: OpSpec, attrs: Mapping[str, Any]) -> None:
        self.arrays = {attr.name: _field_data(attr.type, attrs[attr.name]) for attr in spec.attrs}
        self.collection = trt.PluginFieldCollection(
            [trt.PluginField(a.name, self.arrays[a.name], _field_type(trt, a.type)) for a in spec.attrs]
        )


def attrs_from_fields(spec: OpSpec, fields: Iterable[Any]) -> dict[str, Any]:
    """The attributes of a node or of a serialized plugin; one that is absent raises PluginError."""
    data = {field.name: field.data for field in fields}
    missing = [attr.name for attr in spec.attrs if attr.name not in data]
    if missing:
        raise PluginError(f"{spec.qualified_name}: the node lacks the attributes {', '.join(missing)}; build it again")
    return {attr.name: _attr_value(attr.type, data[attr.name]) for attr in spec.attrs}


def _field_type(trt: ModuleType, attr_type: str) -> Any:
    return getattr(trt.PluginFieldType, _FIELD_TYPES[attr_type])


def _field_data(attr_type: str, value: Any) -> np.ndarray:
    if attr_type == "str":
        return np.frombuffer(value.encode(), np.int8)
    return np.atleast_1d(np.asarray(value, np.float32 if attr_type == "float" else np.int32))


def _attr_value(attr_type: str, data: Any) -> Any:
    if attr_type == "str":
        return bytes(data).rstrip(b"\0").decode()  # a field that the parser made ends with NUL
    if attr_type == "int[]":
        return [int(value) for value in data]
    return float(data[0]) if attr_type == "float" else int(data[0])


# --- errors of callbacks --------------------------------------------------------------------------------------------

_callback_errors: list[str] = []


def take_callback_errors() -> list[str]:
    """What went wrong in plugins, in words, since this was last called.

    TensorRT only learns that a callback failed: its bindings print the exception to the terminal and drop it.
    """
    taken = list(dict.fromkeys(_callback_errors))
    _callback_errors.clear()
    return taken


def _note(node: str, spec: OpSpec, problem: str) -> None:
    _callback_errors.append(f"node {node} ({spec.onnx_op_type}): {problem}")


@contextmanager
def _noted(node: str, spec: OpSpec, callback: str) -> Iterator[None]:
    """Keep the exception of a callback for `take_callback_errors`."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, PluginError) else f"{type(error).__name__}: "
        _note(node, spec, f"{callback}: {kind}{error}")
        raise


def _callback(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a plugin that TensorRT calls and that may fail."""

    @wraps(method)
    def call(self: _OpPlugin, *args: Any) -> Any:
        with _noted(self.node, self.spec, method.__name__):
            return method(self, *args)

    return call


# --- plugin and creator ---------------------------------------------------------------------------------------------


class _OpPlugin:
    """One node: an op with its attributes. Outputs are the spec's, then one alias of each state.

    Everything of a plugin but its TensorRT base classes, which `_plugin_class` adds.
    """

    trt: ModuleType
    node: str
    spec: OpSpec
    attrs: Mapping[str, Any]
    fields: AttrFields

    def get_capability_interface(self, capability: Any) -> Any:
        return self

    def clone(self) -> Any:
        return _plugin_class(self.trt)(self.node, self.spec, self.attrs)

    @_callback
    def get_output_data_types(self, input_types: Sequence[Any]) -> list[Any]:
        dtypes = [torch_dtypes(self.trt).get(dtype) for dtype in input_types]
        outputs = [_trt_dtype(self.trt, dtype) for dtype in self.spec.output_dtypes(dtypes, self.attrs)]
        return outputs + [dtype for arg, dtype in zip(self.spec.inputs, input_types, strict=True) if arg.mutated]

    @_callback
    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], builder: Any) -> list[Any]:
        def wrap(dim: Any) -> DimExpression:
            return dim_expression(self.trt, builder, dim)

        operands = zip(self.spec.inputs, inputs, strict=True)
        shapes = {arg.name: [wrap(dim) for dim in dims] for arg, dims in operands}
        outputs = self.spec.output_shapes(self.spec.bind_dims(shapes, self.attrs))
        outputs += [shapes[state.name] for state in self.spec.states]
        return [self.trt.DimsExprs([wrap(dim).expression for dim in dims]) for dims in outputs]

    def get_aliased_input(self, output_index: int) -> int:
        if output_index < len(self.spec.outputs):
            return _NOT_ALIASED
        state = self.spec.states[output_index - len(self.spec.outputs)]
        return _names(self.spec.inputs).index(state.name)

    @_callback
    def supports_format_combination(self, pos: int, in_out: Sequence[Any], num_inputs: int) -> bool:
        """TensorRT asks in order: what is in front of ``pos`` was found supported."""
        types = [in_out[index].desc.type for index in range(pos + 1)]
        if in_out[pos].desc.format != self.trt.TensorFormat.LINEAR:
            return False
        if pos >= num_inputs + len(self.spec.outputs):
            return types[pos] == types[self.get_aliased_input(pos - num_inputs)]
        dtypes = [torch_dtypes(self.trt).get(dtype) for dtype in types[: min(pos, num_inputs)]]
        activation = self.spec.activation_dtype(dtypes, self.attrs)
        arg = (*self.spec.inputs, *self.spec.outputs)[pos]
        allowed = [_trt_dtype(self.trt, dtype) for dtype in dtypes_of(arg.dtype, activation)]
        if types[pos] not in allowed:
            expected = " or ".join(dtype.name for dtype in allowed)
            _note(self.node, self.spec, f"{arg.name} is {types[pos].name}, expected {expected}")
        return types[pos] in allowed

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """A failure here ends the build; one of `get_workspace_size`, asked next, TensorRT takes for no workspace."""
        self.get_workspace_size(inputs, outputs)

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        pass

    @_callback
    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        """Of the largest shapes, on the largest GPU: which one it will be is not known at the build."""
        if self.spec.launches is None:
            return 0
        return self._plan([desc.max for desc in inputs], [desc.desc.type for desc in inputs], MAX_SMS).scratch_bytes

    def get_valid_tactics(self) -> list[int]:
        return []

    def set_tactic(self, tactic: int) -> None:
        pass

    def get_fields_to_serialize(self) -> Any:
        return self.fields.collection

    def attach_to_context(self, context: Any) -> Any:
        return self.clone()

    @_callback
    def enqueue(
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> None:
        device = torch.cuda.current_device()
        plan = self._plan([d.dims for d in input_desc], [d.type for d in input_desc], num_multiprocessors(device))
        names = [arg.name for arg in (*self.spec.inputs, *self.spec.outputs)]
        # The updated states, behind the outputs, are the states themselves.
        pointers = dict(zip(names, [*inputs, *outputs[: len(self.spec.outputs)]], strict=True))
        execute(plan, pointers, workspace, semaphores(device).data_ptr(), device, stream)

    def _plan(self, dims: Sequence[Any], types: Sequence[Any], num_sms: int) -> Plan:
        names = _names(self.spec.inputs)
        shapes = {name: tuple(shape) for name, shape in zip(names, dims, strict=True)}
        dtypes = {name: torch_dtypes(self.trt)[dtype] for name, dtype in zip(names, types, strict=True)}
        return cached_plan(self.spec, shapes, dtypes, self.attrs, num_sms)


@cache
def _plugin_class(trt: ModuleType) -> type:
    bases = (trt.IPluginV3, trt.IPluginV3OneCore, trt.IPluginV3OneBuildV2, trt.IPluginV3OneRuntime)

    class Plugin(_OpPlugin, *bases):
        def __init__(self, node: str, spec: OpSpec, attrs: Mapping[str, Any]) -> None:
            for base in bases:
                base.__init__(self)
            self.trt, self.node, self.spec, self.attrs = trt, node, spec, attrs
            self.fields = AttrFields(trt, spec, attrs)
            self.plugin_name, self.plugin_version = spec.onnx_op_type, str(spec.version)
            self.plugin_namespace, self.timing_cache_id = NAMESPACE, ""
            self.num_outputs = len(spec.outputs) + len(spec.states)
            # When TensorRT deletes the C++ half of a plugin, its bindings give up the reference that TensorRT held.
            # Were that the last one, the Python half would delete the C++ half again and corrupt the heap.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self))

    return Plugin


def _names(args: Sequence[TensorArg]) -> list[str]:
    return [arg.name for arg in args]


def _trt_dtype(trt: ModuleType, dtype: torch.dtype) -> Any:
    return getattr(trt.DataType, _TRT_DTYPES[dtype])


@cache
def torch_dtypes(trt: ModuleType) -> dict[Any, torch.dtype]:
    """TensorRT's dtypes -> torch's, for those that ops have."""
    return {_trt_dtype(trt, dtype): dtype for dtype in _TRT_DTYPES}


@cache
def _creator_class(trt: ModuleType) -> type:
    class Creator(trt.IPluginCreatorV3One):
        """Makes the plugins of one op, for the ONNX parser and for engine deserialization."""

        def __init__(self, spec: OpSpec) -> None:
            trt.IPluginCreatorV3One.__init__(self)
            self.spec = spec
            self.name, self.plugin_version, self.plugin_namespace = spec.onnx_op_type, str(spec.version), NAMESPACE
            self.field_names = trt.PluginFieldCollection(
                [trt.PluginField(a.name, np.array([]), _field_type(trt, a.type)) for a in spec.attrs]
            )

        def create_plugin(self, name: str, fields: Any, phase: Any) -> Any:
            with _noted(name, self.spec, "create_plugin"):
                return _plugin_class(trt)(name, self.spec, attrs_from_fields(self.spec, fields))

    return Creator


def make_creators(trt: ModuleType, specs: Iterable[OpSpec]) -> list[Any]:
    """An IPluginCreatorV3One per spec, over the given TensorRT module."""
    return [_creator_class(trt)(spec) for spec in specs]


@cache
def register_creators(trt: ModuleType) -> tuple[Any, ...]:
    """Register every plugin with TensorRT's plugin registry, once per module; returns the creators."""
    creators = tuple(make_creators(trt, plugin_specs().values()))
    for creator in creators:
        if not trt.get_plugin_registry().register_creator(creator, NAMESPACE):
            raise PluginError(
                f"TensorRT refused the plugin {creator.name} version {creator.plugin_version} in namespace "
                f"{NAMESPACE!r}: one of that name is registered already"
            )
    return creators
