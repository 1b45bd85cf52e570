"""`OpSpec`: one description of an op from which its torch schema, fake body, ONNX node and TensorRT plugin derive."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.cost import CostCall, CostFunction, StepSize, Work, moves_operands
from qwen4exp_trt.plugins.dims import Dim, evaluate, is_name, names_in
from qwen4exp_trt.plugins.kernels import MIN_CAPABILITY, Call, Launcher, Plan, TensorRef, make_plan

NAMESPACE = "q4e"

DtypeClass = Literal[
    "activation", "activation or float8_e4m3fn", "float32", "int32", "int64", "float8_e4m3fn", "float4_e2m1fn_x2"
]
AttrType = Literal["int", "float", "str", "int[]"]

ACTIVATION_DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class TensorArg:
    """A tensor operand.

    ``dims``: bare names bind to the shape, expressions are checked against it. ``dtype`` ``"activation"`` means
    BF16 or float32, the same for every such operand and output of a call (`OpSpec.activation_dtype`). FP4 operands are
    torch's ``float4_e2m1fn_x2``; their ``dims`` count elements, as ONNX and TensorRT do (`element_shape`). A
    ``mutated`` operand is a state that the op updates in place; an engine sees it as an input and an aliased output.
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


@cache
def dtypes_of(dtype: DtypeClass, activation: torch.dtype | None) -> tuple[torch.dtype, ...]:
    """What a tensor of the class ``dtype`` may be; ``activation`` is the activation dtype of the call, None for any."""
    activations = ACTIVATION_DTYPES if activation is None else (activation,)
    parts = [activations if part == "activation" else (getattr(torch, part),) for part in dtype.split(" or ")]
    return sum(parts, ())


@dataclass(frozen=True)
class Attr:
    """A scalar or list attribute; it may be used as a symbol in dim expressions when it is an int.

    The string attribute ``dtype`` (``"bfloat16"`` or ``"float32"``) is the activation dtype of an op that has no
    operand of it.
    """

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
    ``launches`` is the launcher of its CUDA kernels (`plugins.kernels`), ``cost`` what a call has to move and multiply.
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
    launches: Launcher | None = None
    cost: CostFunction = moves_operands
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

    def activation_dtype(self, dtypes: Sequence[torch.dtype | None], attrs: Mapping[str, Any]) -> torch.dtype | None:
        """The activation dtype of a call: of its first such operand, else of the attribute ``dtype``, else None.

        ``dtypes`` are those of the first operands; an operand behind them counts as unknown.
        """
        name = attrs.get("dtype")
        if name is None:
            pairs = zip(self.inputs, dtypes, strict=False)
            return next((dtype for arg, dtype in pairs if arg.dtype == "activation"), None)
        by_name = {str(dtype).removeprefix("torch."): dtype for dtype in ACTIVATION_DTYPES}
        if name not in by_name:
            raise PluginError(
                f"{self.qualified_name}: attribute dtype is {name!r}, expected one of {', '.join(by_name)}"
            )
        return by_name[name]

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
        activation = self.activation_dtype([tensors[arg.name].dtype for arg in self.inputs], attrs)
        activation = activation if activation in ACTIVATION_DTYPES else None
        for arg in self.inputs:
            tensor, allowed = tensors[arg.name], dtypes_of(arg.dtype, activation)
            if tensor.dtype not in allowed:
                expected = " or ".join(map(str, allowed))
                raise PluginError(f"{self.qualified_name}: operand {arg.name} is {tensor.dtype}, expected {expected}")
            shape = element_shape(tensor.shape, tensor.dtype)
            expected = [evaluate(dim, bound) for dim in arg.dims]
            if shape != expected:
                raise PluginError(
                    f"{self.qualified_name}: operand {arg.name} has shape {shape}, "
                    f"expected {expected} = {list(arg.dims)}"
                )
        return bound

    def output_shapes(self, bound: Mapping[str, Any]) -> list[list[Any]]:
        """The output shapes, evaluated over ints, SymInts or TensorRT expressions."""
        return [[evaluate(dim, bound) for dim in arg.dims] for arg in self.outputs]

    def output_dtypes(self, dtypes: Sequence[torch.dtype | None], attrs: Mapping[str, Any]) -> list[torch.dtype]:
        """The dtypes of the outputs of a call whose operands have ``dtypes``."""
        activation = self.activation_dtype(dtypes, attrs)
        return [dtypes_of(arg.dtype, activation)[0] for arg in self.outputs]

    def plan(
        self,
        shapes: Mapping[str, Sequence[int]],
        dtypes: Mapping[str, torch.dtype],
        attrs: Mapping[str, Any],
        num_sms: int,
        capability: tuple[int, int] = MIN_CAPABILITY,
    ) -> Plan:
        """The kernel launches of a call whose operands have these shapes (in elements) and dtypes."""
        if self.launches is None:
            raise PluginError(f"{self.qualified_name} has no CUDA kernel in this version; run with device='cpu'")
        bound = self.bind_dims(shapes, attrs)
        operands = {arg.name: (shapes[arg.name], dtypes[arg.name]) for arg in self.inputs}
        outputs = self.output_dtypes([dtypes[arg.name] for arg in self.inputs], attrs)
        results = zip(self.outputs, self.output_shapes(bound), outputs, strict=True)
        operands |= {arg.name: (shape, dtype) for arg, shape, dtype in results}
        tensors = {name: TensorRef(name, tuple(shape), dtype) for name, (shape, dtype) in operands.items()}
        return make_plan(self.launches, Call(tensors, bound, attrs, num_sms, capability))

    def work(self, tensors: Mapping[str, Tensor], attrs: Mapping[str, Any], size: StepSize) -> Work:
        """What a call has to move and multiply in a step of ``size``: ``moved`` has all operands and outputs."""
        bound = self.bind_tensors(tensors, attrs)
        whole = {arg.name: tensors[arg.name].nbytes for arg in self.inputs}
        dtypes = self.output_dtypes([tensors[arg.name].dtype for arg in self.inputs], attrs)
        for arg, shape, dtype in zip(self.outputs, self.output_shapes(bound), dtypes, strict=True):
            whole[arg.name] = math.prod(shape) * dtype.itemsize
        work = self.cost(CostCall(size, bound, attrs, whole))
        mutated = {arg.name: 2 * whole[arg.name] for arg in self.states}
        return Work(work.flops, whole | mutated | dict(work.moved))

    def validate(self) -> None:
        """Programmer's check of the spec itself, run when it is registered."""
        assert re.fullmatch(r"[a-z][a-z0-9_]*", self.name), self.name
        bound = {dim for arg in self.inputs for dim in arg.dims if is_name(dim)}
        bound |= {attr.name for attr in self.attrs if attr.type == "int"}
        used = {name for arg in (*self.inputs, *self.outputs) for dim in arg.dims for name in names_in(dim)}
        assert used <= bound, f"{self.name}: dims {sorted(used - bound)} are bound by no operand"
        fixes = sum([any(arg.dtype == "activation" for arg in self.inputs), Attr("dtype", "str") in self.attrs])
        needed = any(arg.dtype == "activation" for arg in self.outputs)
        assert needed <= fixes <= 1, f"{self.name}: an operand or the attribute dtype must fix the activation dtype"
        assert all(arg.dtype != "activation or float8_e4m3fn" for arg in self.outputs), f"{self.name}: two dtypes"
        assert self.cases, f"{self.name} has no sample cases"
