"""`OpSpec`: one description of an op from which its torch schema, fake body, ONNX node and TensorRT plugin derive."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.dims import Dim, evaluate, is_name, names_in

NAMESPACE = "q4e"

DtypeClass = Literal["activation", "float32", "int32", "int64", "float8_e4m3fn", "float4_e2m1fn_x2"]
AttrType = Literal["int", "float", "str", "int[]"]

ACTIVATION_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class TensorArg:
    """A tensor operand.

    ``dims``: bare names bind to the shape, expressions are checked against it. ``dtype`` ``"activation"`` means
    BF16 or float32, the same for every such operand of a call. FP4 operands are torch's ``float4_e2m1fn_x2``; their
    ``dims`` count elements, as ONNX and TensorRT do (`element_shape`). A ``mutated`` operand is a state that the op
    updates in place; an engine sees it as an input and an aliased output.
    """

    name: str
    dims: tuple[Dim, ...]
    dtype: DtypeClass = "activation"
    mutated: bool = False


def element_shape(shape: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """The shape in elements of a tensor that torch says is of ``shape``: ``float4_e2m1fn_x2`` has two in its last dim.

    It is torch's packed FP4: a byte, which torch counts as one, holds the even element in its low nibble.
    """
    return [*shape[:-1], 2 * shape[-1]] if dtype == torch.float4_e2m1fn_x2 else list(shape)


@dataclass(frozen=True)
class Attr:
    """A scalar or list attribute; it may be used as a symbol in dim expressions when it is an int."""

    name: str
    type: AttrType


@dataclass(frozen=True)
class Case:
    """Named sample operands of an op: ``make(dtype, generator)`` gives its keyword arguments."""

    name: str
    make: Callable[[torch.dtype, torch.Generator], dict[str, Any]]


@dataclass(frozen=True)
class OpSpec:
    """One ``q4e::`` op.

    ``body`` is the CPU implementation and ``reference`` the slow float32 oracle; both take the operands and
    attributes by position in the order of ``inputs`` then ``attrs`` and return the outputs (one tensor or a tuple).
    An ``is_native`` op is no plugin: the builder lowers it to ops that TensorRT has itself.
    ``tolerance`` maps an activation dtype to the bound on RMS(reference - got) / RMS(reference) of each output and
    state; integer outputs are always compared exactly.
    """

    name: str
    version: int
    inputs: tuple[TensorArg, ...]
    outputs: tuple[TensorArg, ...]
    attrs: tuple[Attr, ...]
    body: Callable[..., Any]
    reference: Callable[..., Any]
    cases: tuple[Case, ...]
    tolerance: Mapping[torch.dtype, float]
    is_native: bool = False

    @property
    def qualified_name(self) -> str:
        return f"{NAMESPACE}::{self.name}"

    @property
    def onnx_op_type(self) -> str:
        """CamelCase with a prefix: a standard ONNX op name would win over our domain in TensorRT's parser."""
        return "Q4e" + "".join(part.capitalize() for part in self.name.split("_"))

    @property
    def states(self) -> tuple[TensorArg, ...]:
        """The mutated operands, in order."""
        return tuple(arg for arg in self.inputs if arg.mutated)

    @property
    def schema(self) -> str:
        """The torch.library schema."""
        marks = iter("abcdefghij")
        tensors = [f"Tensor({next(marks)}!) {a.name}" if a.mutated else f"Tensor {a.name}" for a in self.inputs]
        attrs = [f"{attr.type} {attr.name}" for attr in self.attrs]
        returns = ", ".join(["Tensor"] * len(self.outputs))
        returns = returns if len(self.outputs) == 1 else f"({returns})"
        return f"{self.name}({', '.join(tensors + attrs)}) -> {returns}"

    @property
    def overload(self) -> torch._ops.OpOverload:
        """The registered op."""
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default

    def split_args(self, args: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Positional arguments -> (operands by name, attributes by name)."""
        names = [arg.name for arg in self.inputs] + [attr.name for attr in self.attrs]
        assert len(args) == len(names), f"{self.name} takes {names}, got {len(args)} arguments"
        pairs = dict(zip(names, args, strict=True))
        attrs = {attr.name: pairs.pop(attr.name) for attr in self.attrs}
        return pairs, attrs

    def bind_tensors(self, tensors: Mapping[str, Tensor], attrs: Mapping[str, Any]) -> dict[str, Any]:
        """`bind_dims` of torch tensors."""
        return self.bind_dims({name: element_shape(t.shape, t.dtype) for name, t in tensors.items()}, attrs)

    def bind_dims(self, shapes: Mapping[str, Sequence[Any]], attrs: Mapping[str, Any]) -> dict[str, Any]:
        """Bind every dim name from the operands' shapes in elements; int attributes are symbols too."""
        bound: dict[str, Any] = {k: v for k, v in attrs.items() if isinstance(v, int)}
        for arg in self.inputs:
            shape = shapes[arg.name]
            if len(shape) != len(arg.dims):
                raise PluginError(
                    f"{self.qualified_name}: operand {arg.name} has rank {len(shape)} (shape {list(shape)}), "
                    f"expected {len(arg.dims)} dims {list(arg.dims)}"
                )
            for dim, extent in zip(arg.dims, shape, strict=True):
                if isinstance(dim, str) and is_name(dim):
                    bound.setdefault(dim, extent)
        return bound

    def check_operands(self, tensors: Mapping[str, Tensor], attrs: Mapping[str, Any]) -> dict[str, Any]:
        """Check ranks, shapes and dtypes of a real call; returns the bound dims."""
        bound = self.bind_tensors(tensors, attrs)
        activation = None
        for arg in self.inputs:
            tensor = tensors[arg.name]
            activation = self._check_dtype(arg, tensor.dtype, activation)
            shape = element_shape(tensor.shape, tensor.dtype)
            expected = [evaluate(dim, bound) for dim in arg.dims]
            if shape != expected:
                raise PluginError(
                    f"{self.qualified_name}: operand {arg.name} has shape {shape}, "
                    f"expected {expected} = {list(arg.dims)}"
                )
        return bound

    def _check_dtype(self, arg: TensorArg, dtype: torch.dtype, activation: torch.dtype | None) -> torch.dtype | None:
        if arg.dtype == "activation":
            allowed = ACTIVATION_DTYPES if activation is None else (activation,)
            activation = dtype
        else:
            allowed = (getattr(torch, arg.dtype),)
        if dtype not in allowed:
            raise PluginError(
                f"{self.qualified_name}: operand {arg.name} is {dtype}, expected {' or '.join(map(str, allowed))}"
            )
        return activation

    def output_shapes(self, bound: Mapping[str, Any]) -> list[list[Any]]:
        """The output shapes, evaluated over ints, SymInts or TensorRT expressions."""
        return [[evaluate(dim, bound) for dim in arg.dims] for arg in self.outputs]

    def output_dtype(self, output: TensorArg, activation: torch.dtype) -> torch.dtype:
        return activation if output.dtype == "activation" else getattr(torch, output.dtype)

    def validate(self) -> None:
        """Programmer's check of the spec itself, run when it is registered."""
        assert re.fullmatch(r"[a-z][a-z0-9_]*", self.name), self.name
        bound = {dim for arg in self.inputs for dim in arg.dims if is_name(dim)}
        bound |= {attr.name for attr in self.attrs if attr.type == "int"}
        used = {name for arg in (*self.inputs, *self.outputs) for dim in arg.dims for name in names_in(dim)}
        assert used <= bound, f"{self.name}: dims {sorted(used - bound)} are bound by no operand"
        assert any(arg.dtype == "activation" for arg in self.inputs) or all(
            arg.dtype != "activation" for arg in self.outputs
        ), f"{self.name}: no operand fixes the activation dtype"
        assert self.cases, f"{self.name} has no sample cases"
