"""The table from the ATen overloads that programs use to ONNX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from qwen4exp_trt.builder.onnx_graph import ONNX_DTYPES, OnnxGraph
from qwen4exp_trt.errors import BuildError


@dataclass(frozen=True)
class Site:
    """One call being lowered to ops that TensorRT has itself.

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
        return self.emit_parts(part, [part], op_type, *inputs, **attrs)[0]

    def emit_parts(
        self, name: str, parts: Sequence[str], op_type: str, *inputs: fx.Node | str, **attrs: Any
    ) -> list[str]:
        """A node with several values before the last one of this call; returns them."""
        outputs = [f"{self.path}.{part}" for part in parts]
        self.graph.add_node(f"{self.path}.{name}", op_type, self._names(inputs), outputs, **attrs)
        return outputs

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
"""Emits the nodes of a call from its `Site` and the arguments of its schema."""


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


def _cat(site: Site, tensors: Sequence[fx.Node], dim: int = 0) -> None:
    parts = [site.operand(f"part{i}", tensor, site.dtype) for i, tensor in enumerate(tensors)]
    site.emit("Concat", *parts, axis=site.int(dim) % site.node.meta["val"].dim())


def _linear(site: Site, x: fx.Node, weight: fx.Node, bias: fx.Node | None = None) -> None:
    if x.meta["val"].dim() != 2:
        raise BuildError(f"{site.path}: linear is lowered for [tokens, features] only; flatten the leading dims first")
    site.emit("Gemm", x, weight, *([] if bias is None else [bias]), transB=1)


def _unsqueeze(site: Site, x: fx.Node, dim: int) -> None:
    site.emit("Unsqueeze", x, site.ints("axes", [site.int(dim) % site.node.meta["val"].dim()]))


def _view(site: Site, x: fx.Node, shape: Sequence[Any]) -> None:
    site.emit("Reshape", x, site.ints("shape", shape))


def _elementwise(op_type: str) -> Lowering:
    return lambda site, x, **_: site.emit(op_type, x)


_ATEN: Any = torch.ops.aten

ATEN_TO_ONNX: dict[Any, Lowering] = {
    _ATEN.add.Tensor: _arithmetic("Add"),
    _ATEN.cat.default: _cat,
    _ATEN.div.Tensor: _arithmetic("Div"),
    _ATEN.embedding.default: _embedding,
    _ATEN.index_select.default: _index_select,
    _ATEN.linear.default: _linear,
    _ATEN.mul.Tensor: _arithmetic("Mul"),
    _ATEN.sigmoid.default: _elementwise("Sigmoid"),
    _ATEN.silu.default: _elementwise("Swish"),
    _ATEN.to.dtype: _cast,
    _ATEN.unsqueeze.default: _unsqueeze,
    _ATEN.view.default: _view,
}
"""ATen overload -> its lowering: one for each of `runtime.program_text.ATEN_OPS`."""
