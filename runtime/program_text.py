"""Programs as text: readable Python of a fixed form, read back by a parser that runs none of it."""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from torch import fx

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.runtime.json_files import read_json_object
from qwen4exp_trt.runtime.program import Program, is_getitem
from qwen4exp_trt.runtime.specs import DTYPE_BYTES, StateSpec, TensorSpec, WeightSpec, input_from_json
from qwen4exp_trt.runtime.weights import dtype_from_name

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

_DTYPES = {f"torch.{name}": dtype_from_name(name) for name in DTYPE_BYTES}

GRAPH_FILE, TABLES_FILE = "graph.py", "tables.json"


def format_program(program: Program) -> str:
    """The graph as Python text; ops whose result's shape and dtype are known carry them as a comment."""
    dims = program.dim_names() if _has_values(program) else {}
    lines = ["import torch", "", "", "def forward("]
    lines += [f"    {node.name}," for node in program.graph.find_nodes(op="placeholder")]
    lines.append("):")
    for node in program.calls():
        lines.append(f"    {node.name} = {_format_call(node)}{_format_value(node.meta.get('val'), dims)}")
    outputs: Any = program.graph.output_node().args[0]
    results = ", ".join(str(node) for node in outputs)
    lines.append(f"    return ({results},)")
    return "\n".join(lines) + "\n"


def save_program(program: Program, folder: Path) -> None:
    """Write ``graph.py`` and ``tables.json`` into ``folder``, which must exist."""
    (folder / GRAPH_FILE).write_text(format_program(program), encoding="utf-8")
    tables = {
        "inputs": [spec.to_json() for spec in program.inputs],
        "states": [asdict(spec) for spec in program.states],
        "weights": [spec.to_json() for spec in program.weights],
        "outputs": [spec.to_json() for spec in program.outputs],
    }
    (folder / TABLES_FILE).write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")


def load_program(folder: Path) -> Program:
    """Read what `save_program` wrote. Raises `BundleError` for any other text; executes nothing of it."""
    tables = read_json_object(folder / TABLES_FILE, BundleError)
    try:
        text = (folder / GRAPH_FILE).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise BundleError(f"{folder}: cannot read the program: {error}") from error
    graph = _GraphReader(folder / GRAPH_FILE, text).read()
    try:
        program = Program(
            graph,
            tuple(input_from_json(spec) for spec in tables["inputs"]),
            tuple(StateSpec.from_json(spec) for spec in tables["states"]),
            tuple(WeightSpec.from_json(spec) for spec in tables["weights"]),
            tuple(TensorSpec.from_json(spec) for spec in tables["outputs"]),
        )
        _check_tables(program)
    except BundleError as error:
        raise BundleError(f"{folder}: {error}; build the bundle again") from error
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError, RecursionError) as error:
        raise BundleError(f"{folder / TABLES_FILE}: not the tables of a program: {error!r}") from error
    return program


def _check_tables(program: Program) -> None:
    results: Any = program.graph.output_node().args[0]
    found = [node.name for node in program.graph.find_nodes(op="placeholder")]
    if found != program.placeholder_names() or len(results) != len(program.outputs):
        differences = sorted(set(found) ^ set(program.placeholder_names()))
        raise BundleError(
            f"{GRAPH_FILE} and {TABLES_FILE} are not of one program: they list other tensors or another "
            f"order (in one only: {differences[:8]}) or {len(results)} and {len(program.outputs)} outputs"
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
    return f"torch.ops.{op_name(node.target)}({', '.join(map(_format_arg, node.args))})"


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


@lru_cache(maxsize=1)
def _ops_by_text() -> dict[str, Any]:
    """Every op that a program may call, by its text."""
    aten = [name.split(".") for name in ATEN_OPS]
    overloads = [getattr(getattr(torch.ops.aten, packet), overload) for _, packet, overload in aten]
    overloads += [spec.overload for spec in all_specs().values()]
    return {f"torch.ops.{op_name(overload)}": overload for overload in overloads}


def _dotted_name(node: ast.expr) -> str:
    """``a.b.c`` of a chain of attributes; empty for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


_CLASSES: dict[str, tuple[type, ...]] = {
    "IntType": (int,),
    "SymIntType": (int,),
    "FloatType": (int, float),
    "BoolType": (bool,),
    "StringType": (str,),
    "ScalarTypeType": (torch.dtype,),
}
"""Kind of a schema's type -> the classes of its values."""


def _fits_schema(target: Any, args: tuple[Any, ...]) -> bool:
    """True if ``target`` can be called with ``args`` as far as their number and kinds go."""
    params = [param for param in target._schema.arguments if not param.kwarg_only]
    are_enough = all(param.has_default_value() for param in params[len(args) :])
    is_aten = target.namespace == "aten"
    kinds = zip(params, args, strict=False)
    return are_enough and len(args) <= len(params) and all(_is_a(arg, p.real_type, is_aten) for p, arg in kinds)


def _is_a(arg: Any, kind: Any, is_aten: bool) -> bool:
    match kind.kind():
        case "OptionalType":
            return arg is None or _is_a(arg, kind.getElementType(), is_aten)
        case "ListType":
            return isinstance(arg, list) and all(_is_a(element, kind.getElementType(), is_aten) for element in arg)
        case "TensorType":
            is_tensor = isinstance(arg, fx.Node) and _num_results(arg) == 1
            return is_tensor or (is_aten and type(arg) in (int, float))  # ATen takes numbers as well
        case name:
            return type(arg) in _CLASSES.get(name, ())


def _num_results(node: fx.Node) -> int:
    return 1 if node.op == "placeholder" or is_getitem(node) else len(cast(Any, node.target)._schema.returns)


def _is_result(node: fx.Node, index: Any) -> bool:
    count = _num_results(node)
    return count > 1 and type(index) is int and 0 <= index < count


class _GraphReader:
    """Builds an FX graph from the text of `format_program`, statement by statement."""

    def __init__(self, where: Path, text: str) -> None:
        self.where, self.text, self.graph = where, text, fx.Graph()
        self.values: dict[str, fx.Node] = {}

    def read(self) -> fx.Graph:
        *statements, last = self._read_header()
        for statement in statements:
            self._read_assignment(statement)
        if not isinstance(last, ast.Return) or not isinstance(last.value, ast.Tuple):
            self._fail(last, "a returned tuple")
        results = tuple(self._read_value(element) for element in last.value.elts)
        if any(_num_results(node) != 1 for node in results):
            self._fail(last, "a returned tuple of single values")
        self.graph.output(results)
        return self.graph

    def _read_header(self) -> list[ast.stmt]:
        """Make the placeholders; returns the body of the function."""
        try:
            statements = ast.parse(self.text).body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line, message = getattr(error, "lineno", None) or 1, getattr(error, "msg", error)
            raise BundleError(f"{self.where}:{line}: not a program: {message}") from error
        if len(statements) != 2 or not isinstance(statements[0], ast.Import) or statements[0].names[0].name != "torch":
            self._fail(statements[0] if statements else None, "`import torch` and one function")
        function = statements[1]
        if not isinstance(function, ast.FunctionDef) or function.decorator_list or function.args.defaults:
            self._fail(function, "one plain function")
        for arg in function.args.args:
            self._add(arg, arg.arg, "placeholder", arg.arg, ())
        return function.body

    def _read_assignment(self, statement: ast.stmt) -> None:
        if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Name):
            self._fail(statement, "an assignment to a name")
        name, value = statement.targets[0].id, statement.value
        if isinstance(value, ast.Subscript):
            args = (self._read_value(value.value), self._read_literal(value.slice))
            if not _is_result(*args):
                self._fail(statement, "one of the results of an op that has several")
            self._add(statement, name, "call_function", operator.getitem, args)
        elif isinstance(value, ast.Call) and not value.keywords:
            target = _ops_by_text().get(_dotted_name(value.func))
            if target is None:
                self._fail(statement, "a call of an op of the fixed list")
            args = tuple(self._read_arg(arg) for arg in value.args)
            if not _fits_schema(target, args):
                self._fail(statement, f"arguments that fit `{target._schema}`")
            self._add(statement, name, "call_function", target, args)
        else:
            self._fail(statement, "a call of an op, or one of its results")

    def _add(self, where: ast.AST, name: str, op: str, target: Any, args: tuple[Any, ...]) -> None:
        self.values[name] = self.graph.create_node(op, target, args, name=name)
        if self.values[name].name != name:
            self._fail(where, "a new name that is not a keyword or builtin of Python")

    def _read_arg(self, node: ast.expr) -> Any:
        if isinstance(node, ast.List):
            return [self._read_arg(element) for element in node.elts]
        if isinstance(node, ast.Attribute):
            dtype = _DTYPES.get(_dotted_name(node))
            return self._fail(node, f"one of {sorted(_DTYPES)}") if dtype is None else dtype
        return self._read_value(node) if isinstance(node, ast.Name) else self._read_literal(node)

    def _read_value(self, node: ast.expr) -> fx.Node:
        if not isinstance(node, ast.Name) or node.id not in self.values:
            self._fail(node, "a value defined above")
        return self.values[node.id]

    def _read_literal(self, node: ast.expr) -> int | float | str | None:
        match node:
            case ast.Constant(value=(int() | float() | str() | None) as value):
                return value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=(int() | float()) as value)):
                return -value
        self._fail(node, "a number or a string")

    def _fail(self, node: ast.AST | None, expected: str) -> NoReturn:
        line = getattr(node, "lineno", 1)
        found = self.text.splitlines()[line - 1].strip()[:100] if self.text else ""
        raise BundleError(f"{self.where}:{line}: expected {expected}, found `{found}`")
