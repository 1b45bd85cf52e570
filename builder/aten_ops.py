"""The table from the ATen overloads that programs use to ONNX."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from qwen4exp_trt.builder.onnx_graph import ONNX_DTYPES, OnnxGraph
from qwen4exp_trt.errors import BuildError

_INT64_MAX = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class Site:
    """One ATen call being lowered.

    ``path`` is its node path, ``outputs`` the names of its values, ``value_of`` gives the value that a node's readers
    read here.
    """

    graph: OnnxGraph
    node: fx.Node
    path: str
    outputs: Sequence[str]
    value_of: Callable[[fx.Node], str]

    @property
    def dtype(self) -> torch.dtype:
        """Of the result."""
        return self.node.meta["val"].dtype

    def emit(self, op_type: str, *inputs: fx.Node | str, **attrs: Any) -> None:
        """The node that produces this call's values."""
        self.graph.add_node(self.path, op_type, self._names(inputs), self.outputs, **attrs)

    def emit_part(self, part: str, op_type: str, *inputs: fx.Node | str, **attrs: Any) -> str:
        """A node before the last one of this call; returns its value."""
        name = f"{self.path}.{part}"
        self.graph.add_node(name, op_type, self._names(inputs), [name], **attrs)
        return name

    def ints(self, part: str, values: Sequence[Any]) -> str:
        """A constant list of sizes or axes."""
        extents = torch.tensor([self.int(value) for value in values], dtype=torch.int64)
        return self.graph.add_constant(f"{self.path}.{part}", extents)

    def int(self, value: Any) -> int:
        if isinstance(value, int):
            return value
        raise BuildError(
            f"{self.path}: {self.node.target} takes the size {value}, known only at run time; "
            f"rewrite it in a pass so that the size is static"
        )

    def axis(self, dim: Any) -> int:
        """A dim of the first operand, counted from the front."""
        return self.int(dim) % self.node.args[0].meta["val"].dim()  # type: ignore[union-attr]

    def operand(self, part: str, value: Any, dtype: torch.dtype) -> fx.Node | str:
        """An operand of an arithmetic op in ``dtype``: a tensor, cast where torch would promote it, or a scalar."""
        if not isinstance(value, fx.Node):
            return self.graph.add_constant(f"{self.path}.{part}", self._exact_scalar(value, dtype))
        if value.meta["val"].dtype == dtype:
            return value
        return self.emit_part(part, "Cast", value, to=ONNX_DTYPES[dtype])

    def _exact_scalar(self, value: float, dtype: torch.dtype) -> Tensor:
        scalar = torch.tensor(value, dtype=dtype)
        if scalar.float() != torch.tensor(value).float():
            raise BuildError(
                f"{self.path}: {self.node.target} has the scalar {value}, which {dtype} would round to "
                f"{scalar.item()}; torch computes with the scalar itself, so compute in float32 and cast"
            )
        return scalar

    def _names(self, inputs: Sequence[fx.Node | str]) -> list[str]:
        return [value if isinstance(value, str) else self.value_of(value) for value in inputs]


Lowering = Callable[..., None]
"""Emits the nodes of a call from its `Site` and the arguments of its ATen schema."""


def _arithmetic(op_type: str) -> Lowering:
    def lower(site: Site, left: Any, right: Any, *, alpha: float = 1) -> None:
        if alpha != 1:
            raise BuildError(f"{site.path}: {site.node.target} with alpha={alpha} is not lowered; multiply first")
        operands = [site.operand(part, v, site.dtype) for part, v in (("left", left), ("right", right))]
        site.emit(op_type, *operands)

    return lower


def _cast(site: Site, x: fx.Node, *_: Any, **kwargs: Any) -> None:
    site.emit("Cast", x, to=ONNX_DTYPES[site.dtype])


def _embedding(site: Site, weight: fx.Node, indices: fx.Node, *_: Any) -> None:
    site.emit("Gather", weight, indices, axis=0)


def _index_select(site: Site, x: fx.Node, dim: int, index: fx.Node) -> None:
    site.emit("Gather", x, index, axis=site.axis(dim))


def _select(site: Site, x: fx.Node, dim: int, index: int) -> None:
    constant = site.graph.add_constant(f"{site.path}.index", torch.tensor(site.int(index)))
    site.emit("Gather", x, constant, axis=site.axis(dim))


def _cat(site: Site, tensors: Sequence[fx.Node], dim: int = 0) -> None:
    parts = [site.operand(f"part{i}", tensor, site.dtype) for i, tensor in enumerate(tensors)]
    site.emit("Concat", *parts, axis=site.int(dim) % site.node.meta["val"].dim())


def _linear(site: Site, x: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> None:
    if x.meta["val"].dim() != 2:
        raise BuildError(f"{site.path}: linear is lowered for [tokens, features] only; flatten the leading dims first")
    site.emit("Gemm", x, weight, *([] if bias is None else [bias]), transB=1)


def _matmul(site: Site, left: fx.Node, right: fx.Node) -> None:
    site.emit("MatMul", left, right)


def _unsqueeze(site: Site, x: fx.Node, dim: int) -> None:
    site.emit("Unsqueeze", x, site.ints("axes", [site.int(dim) % site.node.meta["val"].dim()]))


def _squeeze(site: Site, x: fx.Node, dims: int | Sequence[int]) -> None:
    axes = [site.axis(dim) for dim in ([dims] if isinstance(dims, int) else dims)]
    ones = [axis for axis in axes if x.meta["val"].shape[axis] == 1]  # torch keeps the others
    if ones:
        site.emit("Squeeze", x, site.ints("axes", ones))
    else:
        site.emit("Identity", x)


def _reshape(site: Site, x: fx.Node, shape: Sequence[Any]) -> None:
    """At most one extent may be dynamic: it is what the others leave."""
    inferred = [-1 if isinstance(extent, fx.Node) else extent for extent in shape]
    if inferred.count(-1) > 1:
        raise BuildError(f"{site.path}: reshape to {list(shape)} has more than one dynamic extent; split it in a pass")
    site.emit("Reshape", x, site.ints("shape", inferred))


def _flatten(site: Site, x: fx.Node, start_dim: int = 0, end_dim: int = -1) -> None:
    extents = list(x.meta["val"].shape)
    start, end = site.axis(start_dim), site.axis(end_dim)
    merged = extents[start : end + 1]
    middle = math.prod(merged) if all(isinstance(extent, int) for extent in merged) else -1
    outer = [extent if isinstance(extent, int) else -1 for extent in (*extents[:start], *extents[end + 1 :])]
    _reshape(site, x, [*outer[:start], middle, *outer[start:]])


def _permute(site: Site, x: fx.Node, dims: Sequence[int]) -> None:
    site.emit("Transpose", x, perm=[site.axis(dim) for dim in dims])


def _transpose(site: Site, x: fx.Node, dim0: int, dim1: int) -> None:
    order = list(range(x.meta["val"].dim()))
    first, second = site.axis(dim0), site.axis(dim1)
    order[first], order[second] = second, first
    _permute(site, x, order)


def _slice(
    site: Site, x: fx.Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> None:
    bounds = {"starts": start or 0, "ends": _INT64_MAX if end is None else end, "axes": site.axis(dim), "steps": step}
    site.emit("Slice", x, *(site.ints(part, [value]) for part, value in bounds.items()))


def _split(site: Site, x: fx.Node, sizes: Sequence[int], dim: int = 0) -> None:
    site.emit("Split", x, site.ints("sizes", sizes), axis=site.axis(dim))


def _elementwise(op_type: str) -> Lowering:
    return lambda site, x, **_: site.emit(op_type, x)


def _emit_nothing(site: Site, *_: Any) -> None:
    """A size that shapes mention; see `_reshape`."""


_ATEN: Any = torch.ops.aten

ATEN_TO_ONNX: dict[Any, Lowering] = {
    _ATEN._to_copy.default: _cast,
    _ATEN.add.Tensor: _arithmetic("Add"),
    _ATEN.cat.default: _cat,
    _ATEN.clone.default: _elementwise("Identity"),
    _ATEN.div.Tensor: _arithmetic("Div"),
    _ATEN.embedding.default: _embedding,
    _ATEN.flatten.using_ints: _flatten,
    _ATEN.index_select.default: _index_select,
    _ATEN.linear.default: _linear,
    _ATEN.matmul.default: _matmul,
    _ATEN.mm.default: _matmul,
    _ATEN.mul.Tensor: _arithmetic("Mul"),
    _ATEN.permute.default: _permute,
    _ATEN.reshape.default: _reshape,
    _ATEN.select.int: _select,
    _ATEN.sigmoid.default: _elementwise("Sigmoid"),
    _ATEN.silu.default: _elementwise("Swish"),
    _ATEN.slice.Tensor: _slice,
    _ATEN.split_with_sizes.default: _split,
    _ATEN.squeeze.dim: _squeeze,
    _ATEN.squeeze.dims: _squeeze,
    _ATEN.sub.Tensor: _arithmetic("Sub"),
    _ATEN.sym_size.int: _emit_nothing,
    _ATEN.t.default: lambda site, x: _permute(site, x, (1, 0)),
    _ATEN.to.dtype: _cast,
    _ATEN.transpose.int: _transpose,
    _ATEN.unsqueeze.default: _unsqueeze,
    _ATEN.view.default: _reshape,
}
"""ATen overload -> its lowering. An op that is not here fails the build by name."""
