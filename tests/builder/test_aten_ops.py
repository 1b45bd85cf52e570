"""Every entry of the lowering table against torch, through the ONNX interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from qwen4exp_trt.builder.aten_ops import ATEN_TO_ONNX
from qwen4exp_trt.builder.interpret import OnnxProgram
from qwen4exp_trt.builder.lower import lower_program
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.runtime.program import Program, is_getitem
from qwen4exp_trt.runtime.program_text import ATEN_OPS, op_name
from qwen4exp_trt.runtime.specs import TensorSpec
from qwen4exp_trt.runtime.weights import dtype_from_name

aten: Any = torch.ops.aten
BF16, F32 = torch.bfloat16, torch.float32

SHAPES: dict[str, tuple[int | str, ...]] = {
    "x": ("T", 6),
    "y": ("T", 6),
    "cube": ("T", 2, 6),
    "thin": ("T", 1, 6),
    "block": (4, 2, 6),
    "m": (5, 6),
    "bias": (5,),
    "rows": ("L",),
}
EXTENTS = {"T": 7, "L": 3}

Function = Callable[..., Any]

OPS: dict[str, Function] = {
    "add": lambda x, y: aten.add.Tensor(x, y),
    "add a broadcast row": lambda cube, x: aten.add.Tensor(cube, aten.unsqueeze.default(x, 1)),
    "add a scalar": lambda x: aten.add.Tensor(x, 1.0),
    "add two dtypes": lambda x, y: aten.add.Tensor(aten.to.dtype(x, BF16), aten.to.dtype(y, F32)),
    "sub": lambda x, y: aten.sub.Tensor(x, y),
    "mul": lambda x, y: aten.mul.Tensor(x, y),
    "mul by an integer": lambda x: aten.mul.Tensor(x, 2),
    "div": lambda x, y: aten.div.Tensor(x, y),
    "div by an integer": lambda x: aten.div.Tensor(x, 4),
    "div of integers": lambda rows: aten.div.Tensor(rows, rows),
    "silu": lambda x: aten.silu.default(x),
    "sigmoid": lambda x: aten.sigmoid.default(x),
    "linear": lambda x, m: aten.linear.default(x, m),
    "linear with bias": lambda x, m, bias: aten.linear.default(x, m, bias),
    "mm": lambda x, m: aten.mm.default(x, aten.t.default(m)),
    "matmul": lambda x, m: aten.matmul.default(x, aten.transpose.int(m, 0, 1)),
    "embedding": lambda m, rows: aten.embedding.default(m, rows),
    "index_select of rows": lambda x, rows: aten.index_select.default(x, 0, rows),
    "index_select of columns": lambda x, rows: aten.index_select.default(x, -1, rows),
    "select the first": lambda x: aten.select.int(x, 0, 0),
    "select the last": lambda cube: aten.select.int(cube, 1, -1),
    "cat": lambda x, y: aten.cat.default([x, y, x], -1),
    "cat of rows": lambda x, m: aten.cat.default([x, m]),
    "cat of two dtypes": lambda x, y: aten.cat.default([aten.to.dtype(x, BF16), aten.to.dtype(y, F32)], 1),
    "to": lambda x: aten.to.dtype(x, BF16),
    "_to_copy": lambda x: aten._to_copy.default(x, dtype=F32),
    "clone": lambda x: aten.clone.default(x),
    "unsqueeze in the middle": lambda x: aten.unsqueeze.default(x, 1),
    "unsqueeze at the end": lambda x: aten.unsqueeze.default(x, -1),
    "squeeze": lambda thin: aten.squeeze.dim(thin, 1),
    "squeeze of an extent above one": lambda thin: aten.squeeze.dim(thin, -1),
    "squeeze of several": lambda thin: aten.squeeze.dims(thin, [1, 2]),
    "view": lambda cube: aten.view.default(cube, [-1, 12]),
    "view of a dynamic extent": lambda x: aten.view.default(x, [aten.sym_size.int(x, 0), 2, 3]),
    "reshape": lambda cube: aten.reshape.default(aten.transpose.int(cube, 0, 1), [-1, 6]),
    "flatten behind": lambda cube: aten.flatten.using_ints(cube, 1),
    "flatten in front": lambda cube: aten.flatten.using_ints(cube, 0, 1),
    "permute": lambda cube: aten.permute.default(cube, [2, 0, -2]),
    "transpose": lambda cube: aten.transpose.int(cube, -1, 0),
    "slice": lambda x: aten.slice.Tensor(x, 1, 1, 5, 2),
    "slice from the end": lambda x: aten.slice.Tensor(x, -1, -2),
    "slice without a start": lambda x: aten.slice.Tensor(x, 0, None, 3),
    "split_with_sizes": lambda x: [aten.split_with_sizes.default(x, [1, 3, 2], -1)[i] for i in range(3)],
    "one part of a split": lambda x: aten.split_with_sizes.default(x, [1, 3, 2], 1)[1],
}


class _FakeValues(fx.Interpreter):
    """Notes on every node the fake value that it computes."""

    def run_node(self, n: fx.Node) -> Any:
        n.meta["val"] = super().run_node(n)
        return n.meta["val"]


def program_of(function: Function, dtype: str) -> Program:
    """A program of the ATen overloads that ``function`` calls on the inputs that its parameters name."""
    module = fx.symbolic_trace(function)
    inputs = tuple(
        TensorSpec(node.name, SHAPES[node.name], "int32" if node.name == "rows" else dtype)
        for node in module.graph.find_nodes(op="placeholder")
    )
    mode = FakeTensorMode(shape_env=ShapeEnv())
    _FakeValues(module).run(*(_fake(mode, spec) for spec in inputs))
    results: Any = module.graph.output_node().args[0]
    results = list(results) if isinstance(results, list | tuple) else [results]
    module.graph.output_node().args = (tuple(results),)
    outputs = tuple(_spec_of(f"out_{i}", node.meta["val"]) for i, node in enumerate(results))
    return Program.from_graph(module.graph, inputs, (), (), outputs)


def _spec_of(name: str, value: Tensor) -> TensorSpec:
    dims = tuple(extent if isinstance(extent, int) else str(extent) for extent in value.shape)
    return TensorSpec(name, dims, str(value.dtype).removeprefix("torch."))


def _fake(mode: FakeTensorMode, spec: TensorSpec) -> Tensor:
    dynamic = [DimDynamic.DYNAMIC if isinstance(dim, str) else DimDynamic.STATIC for dim in spec.shape]
    return mode.from_tensor(random_input(spec), symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic))


def random_input(spec: TensorSpec) -> Tensor:
    shape = [EXTENTS[dim] if isinstance(dim, str) else dim for dim in spec.shape]
    if spec.dtype == "int32":
        return torch.randint(1, 5, shape, dtype=torch.int32)
    return torch.randn(shape).to(dtype_from_name(spec.dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPS)
def test_lowered_op_equals_torch(name: str, dtype: str) -> None:
    program = program_of(OPS[name], dtype)
    model = onnx.load_from_string(lower_program(program).SerializeToString())
    onnx.checker.check_model(model, full_check=True)
    inputs = {spec.name: random_input(spec) for spec in program.inputs}
    expected = OPS[name](*inputs.values())
    expected = expected if isinstance(expected, list) else [expected]
    for value, got in zip(expected, OnnxProgram(model).run(inputs).values(), strict=True):
        assert got.dtype == value.dtype
        assert torch.equal(got, value)


def test_every_entry_of_the_table_is_tested() -> None:
    nodes = [node for function in OPS.values() for node in program_of(function, "float32").calls()]
    assert {node.target for node in nodes if not is_getitem(node)} == set(ATEN_TO_ONNX)


def test_every_op_that_a_program_may_hold_is_lowered() -> None:
    assert {op_name(op) for op in ATEN_TO_ONNX} >= ATEN_OPS


def _two_sizes(x: Any) -> Any:
    size = aten.sym_size.int(x, 0)
    return aten.view.default(aten.matmul.default(x, aten.t.default(x)), [size, 1, size])


REFUSED: dict[str, tuple[Function, str]] = {
    "an op outside the table": (lambda x: aten.erf.default(x), r"erf_default: the op aten\.erf\.default cannot be"),
    "a scaled sum": (lambda x: aten.add.Tensor(x, x, alpha=2), r"add_tensor: aten\.add\.Tensor with alpha=2"),
    "a scalar that BF16 rounds": (lambda x: aten.mul.Tensor(x, 0.1), r"mul_tensor: .* scalar 0\.1, which .*bfloat16"),
    "two dynamic extents": (_two_sizes, "view_default: .* more than one dynamic extent"),
    "a slice by a dynamic extent": (
        lambda x: aten.slice.Tensor(x, 0, 0, aten.sym_size.int(x, 0)),
        "slice_tensor: .* known only at run time",
    ),
    "linear of a cube": (lambda block, m: aten.linear.default(block, m), "linear_default: linear is lowered for"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_lowered_is_named(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(BuildError, match=message):
        lower_program(program_of(function, "bfloat16"))
