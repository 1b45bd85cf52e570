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
    "mul": lambda x, y: aten.mul.Tensor(x, y),
    "mul by an integer": lambda x: aten.mul.Tensor(x, 2),
    "div": lambda x, y: aten.div.Tensor(x, y),
    "div by an integer": lambda x: aten.div.Tensor(x, 4),
    "div of integers": lambda rows: aten.div.Tensor(rows, rows),
    "silu": lambda x: aten.silu.default(x),
    "sigmoid": lambda x: aten.sigmoid.default(x),
    "linear": lambda x, m: aten.linear.default(x, m),
    "linear with bias": lambda x, m, bias: aten.linear.default(x, m, bias),
    "embedding": lambda m, rows: aten.embedding.default(m, rows),
    "index_select of rows": lambda x, rows: aten.index_select.default(x, 0, rows),
    "index_select of columns": lambda x, rows: aten.index_select.default(x, -1, rows),
    "cat": lambda x, y: aten.cat.default([x, y, x], -1),
    "cat of rows": lambda x, m: aten.cat.default([x, m]),
    "cat of two dtypes": lambda x, y: aten.cat.default([aten.to.dtype(x, BF16), aten.to.dtype(y, F32)], 1),
    "to": lambda x: aten.to.dtype(x, BF16),
    "unsqueeze in the middle": lambda x: aten.unsqueeze.default(x, 1),
    "unsqueeze at the end": lambda x: aten.unsqueeze.default(x, -1),
    "view": lambda cube: aten.view.default(cube, [-1, 12]),
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


def test_the_table_is_the_list_of_ops_that_a_program_may_hold() -> None:
    assert {op_name(op) for op in ATEN_TO_ONNX} == ATEN_OPS


REFUSED: dict[str, tuple[Function, str]] = {
    "an op outside the table": (lambda x: aten.erf.default(x), r"erf_default: the op aten\.erf\.default cannot be"),
    "a scaled sum": (lambda x: aten.add.Tensor(x, x, alpha=2), r"add_tensor: aten\.add\.Tensor with alpha=2"),
    "a scalar that BF16 rounds": (lambda x: aten.mul.Tensor(x, 0.1), r"mul_tensor: .* scalar 0\.1, which .*bfloat16"),
    "a view by a dynamic extent": (
        lambda x: aten.view.default(x, [aten.sym_size.int(x, 0), 2, 3]),
        r"sym_size_int: the op aten\.sym_size\.int cannot be",
    ),
    "linear of a cube": (lambda block, m: aten.linear.default(block, m), "linear_default: linear is lowered for"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_lowered_is_named(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(BuildError, match=message):
        lower_program(program_of(function, "bfloat16"))
