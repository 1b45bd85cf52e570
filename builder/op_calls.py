"""The calls of a program's ops that have kernels, by shapes alone, so that their launchers can be asked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from qwen4exp_trt.plugins.kernels import MIN_CAPABILITY, Plan
from qwen4exp_trt.plugins.registry import spec_of
from qwen4exp_trt.plugins.spec import OpSpec, element_shape
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.specs import extent_of


class OpCall(NamedTuple):
    """An op with the shapes and dtypes of its operands and its attributes.

    Shapes are in elements; a dynamic extent is a dim's name, or with a factor in front such as ``4*T``.
    """

    spec: OpSpec
    shapes: dict[str, list[int | str]]
    dtypes: dict[str, torch.dtype]
    attrs: dict[str, Any]

    def plan(self, dims: Mapping[str, int], num_sms: int, capability: tuple[int, int] = MIN_CAPABILITY) -> Plan:
        """The kernel launches at the extents ``dims`` on a GPU with ``num_sms`` multiprocessors."""
        shapes = {name: [_extent(dim, dims) for dim in shape] for name, shape in self.shapes.items()}
        return self.spec.plan(shapes, self.dtypes, self.attrs, num_sms, capability)

    def uses(self, dim: str) -> bool:
        """Whether an operand has the dynamic extent ``dim``."""
        return any(dim in shape for shape in self.shapes.values())


def distinct_calls(program: Program) -> list[OpCall]:
    """The calls of ops with kernels that differ in shapes, dtypes or attributes. Nodes must carry fake tensors."""
    names, calls = program.dim_names(), dict[str, OpCall]()
    for node in program.calls():
        spec = spec_of(node.target)
        if spec is None or spec.launches is None:
            continue
        operands, attrs = spec.split_args(node.args)
        values = {name: _fake(value) for name, value in operands.items()}
        extents = {name: element_shape(value.shape, value.dtype) for name, value in values.items()}
        shapes = {name: [_dim(extent, names) for extent in shape] for name, shape in extents.items()}
        call = OpCall(spec, shapes, {name: value.dtype for name, value in values.items()}, attrs)
        calls.setdefault(repr((spec.name, *call[1:])), call)
    return list(calls.values())


def _fake(node: Any) -> torch.Tensor:
    assert isinstance(node, fx.Node), node
    return node.meta["val"]


def _dim(extent: Any, names: Mapping[str, str]) -> int | str:
    if isinstance(extent, int):
        return extent
    *factors, symbol = str(extent).split("*")
    return "*".join([*factors, names[symbol]])


def _extent(dim: int | str, dims: Mapping[str, int]) -> int:
    if isinstance(dim, int):
        return dim
    *factors, name = dim.split("*")
    return math.prod(map(int, factors)) * extent_of(name, dims)
