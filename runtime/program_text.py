"""Programs as text: readable Python of a fixed form, read back by a parser that runs none of it."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import fx

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.spec import NAMESPACE
from qwen4exp_trt.runtime.program import Program, is_getitem
from qwen4exp_trt.runtime.specs import StateSpec, TensorSpec, WeightSpec

ATEN_OPS = frozenset(
    f"aten.{name}"
    for name in (
        "add.Tensor",
        "cat.default",
        "div.Tensor",
        "embedding.default",
        "index_select.default",
        "linear.default",
        "mul.Tensor",
        "sigmoid.default",
        "silu.default",
        "to.dtype",
        "unsqueeze.default",
        "view.default",
    )
)
"""The ATen overloads that a program may hold beside the ``q4e::`` ops."""

GRAPH_FILE, TABLES_FILE = "graph.py", "tables.json"


def format_program(program: Program) -> str:
    """The graph as Python text; ops whose result's shape and dtype are known carry them as a comment."""
    dims = program.dim_names() if _has_values(program) else {}
    lines = ["import torch", "", "", "def forward("]
    lines += [f"    {node.name}," for node in program.graph.find_nodes(op="placeholder")]
    lines.append("):")
    for node in program.calls():
        lines.append(f"    {node.name} = {_format_call(node)}{_format_value(node.meta.get('val'), dims)}")
    results = ", ".join(str(node) for node in program.graph.output_node().args[0])
    lines.append(f"    return ({results},)")
    return "\n".join(lines) + "\n"


def save_program(program: Program, folder: Path) -> None:
    """Write ``graph.py`` and ``tables.json`` into ``folder``, which must exist."""
    (folder / GRAPH_FILE).write_text(format_program(program), encoding="utf-8")
    tables = {
        "inputs": [asdict(spec) for spec in program.inputs],
        "states": [asdict(spec) for spec in program.states],
        "weights": [spec.to_json() for spec in program.weights],
        "outputs": [asdict(spec) for spec in program.outputs],
    }
    (folder / TABLES_FILE).write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")


def load_program(folder: Path) -> Program:
    """Read what `save_program` wrote. Raises `BundleError` for any other text; executes nothing of it."""
    try:
        text = (folder / GRAPH_FILE).read_text(encoding="utf-8")
        tables = json.loads((folder / TABLES_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BundleError(f"{folder}: cannot read the program: {error}") from error
    graph = _GraphReader(folder / GRAPH_FILE).read(text)
    return Program(
        graph,
        tuple(TensorSpec.from_json(spec) for spec in tables["inputs"]),
        tuple(StateSpec.from_json(spec) for spec in tables["states"]),
        tuple(WeightSpec.from_json(spec) for spec in tables["weights"]),
        tuple(TensorSpec.from_json(spec) for spec in tables["outputs"]),
    )


def op_name(target: Any) -> str:
    """``aten.linear.default``, ``q4e.moe.default``: the overload below ``torch.ops``."""
    assert isinstance(target, torch._ops.OpOverload), target
    return str(target)


def _has_values(program: Program) -> bool:
    return all(node.meta.get("val") is not None for node in program.graph.find_nodes(op="placeholder"))


def _format_call(node: fx.Node) -> str:
    if is_getitem(node):
        return f"{node.args[0]}[{node.args[1]}]"
    args = [_format_arg(arg) for arg in node.args] + [f"{k}={_format_arg(v)}" for k, v in node.kwargs.items()]
    return f"torch.ops.{op_name(node.target)}({', '.join(args)})"


def _format_arg(arg: Any) -> str:
    if isinstance(arg, list | tuple):
        return f"[{', '.join(map(_format_arg, arg))}]"
    if isinstance(arg, fx.Node | torch.dtype):
        return str(arg)
    assert arg is None or isinstance(arg, int | float | str), f"argument {arg!r} has no text form"
    return repr(arg)


def _format_value(value: Any, dims: Mapping[str, str]) -> str:
    values = value if isinstance(value, list | tuple) else [value]
    if any(v is None for v in values):
        return ""
    texts = [
        f"{str(v.dtype).removeprefix('torch.')}[{', '.join(dims.get(str(d), str(d)) for d in v.shape)}]" for v in values
    ]
    return f"  # {', '.join(texts)}"


class _GraphReader:
    """Builds an FX graph from the text of `format_program`, statement by statement."""

    def __init__(self, where: Path) -> None:
        self.where, self.graph = where, fx.Graph()
        self.values: dict[str, fx.Node] = {}

    def read(self, text: str) -> fx.Graph:
        try:
            module = ast.parse(text)
        except SyntaxError as error:
            raise BundleError(f"{self.where}:{error.lineno}: not a program: {error.msg}") from error
        functions = [statement for statement in module.body if isinstance(statement, ast.FunctionDef)]
        self._require(len(functions) == 1 and len(module.body) == 2, module, "one import and one function")
        for arg in functions[0].args.args:
            self.values[arg.arg] = self.graph.create_node("placeholder", arg.arg, name=arg.arg)
        *statements, last = functions[0].body
        for statement in statements:
            self._read_assignment(statement)
        self._require(isinstance(last, ast.Return) and isinstance(last.value, ast.Tuple), last, "a returned tuple")
        self.graph.output(tuple(self._read_arg(element) for element in last.value.elts))
        return self.graph

    def _read_assignment(self, statement: ast.stmt) -> None:
        is_assignment = isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        self._require(is_assignment, statement, "an assignment to a name")
        name, value = statement.targets[0].id, statement.value
        if isinstance(value, ast.Subscript):
            target, args, kwargs = operator.getitem, (self._read_arg(value.value), self._read_arg(value.slice)), {}
        else:
            self._require(isinstance(value, ast.Call), value, "a call of an op")
            target = self._read_op(value.func)
            args = tuple(self._read_arg(arg) for arg in value.args)
            kwargs = {str(keyword.arg): self._read_arg(keyword.value) for keyword in value.keywords}
        self.values[name] = self.graph.create_node("call_function", target, args, kwargs, name=name)

    def _read_op(self, node: ast.expr) -> Any:
        name = ast.unparse(node).removeprefix("torch.ops.")
        namespace, _, rest = name.partition(".")
        if namespace == NAMESPACE and rest.removesuffix(".default") in all_specs():
            return all_specs()[rest.removesuffix(".default")].overload
        self._require(name in ATEN_OPS, node, "an op of the fixed list")
        packet, overload = rest.split(".")
        return getattr(getattr(torch.ops.aten, packet), overload)

    def _read_arg(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            self._require(node.id in self.values, node, "a value defined above")
            return self.values[node.id]
        if isinstance(node, ast.List):
            return [self._read_arg(element) for element in node.elts]
        if isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch."):
            dtype = getattr(torch, node.attr, None)
            self._require(isinstance(dtype, torch.dtype), node, "a torch dtype")
            return dtype
        try:
            return ast.literal_eval(node)
        except ValueError:
            self._require(False, node, "a value, a list, a dtype or a literal")

    def _require(self, condition: bool, node: ast.AST, expected: str) -> None:
        if not condition:
            line = getattr(node, "lineno", 1)
            raise BundleError(f"{self.where}:{line}: found `{ast.unparse(node)[:80]}`, expected {expected}")
