"""Follows the values of TensorRT through the statements of one function or module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from trt_api import Use, parse_type
from trt_calls import call
from trt_values import NOTHING, Class, Function, Value, Values, many, one, pairs

if TYPE_CHECKING:
    from trt_flow import Flow

PACKAGE = "qwen4exp_trt"
_SAME_ITEMS = ("list", "tuple", "sorted", "iter", "reversed", "set", "frozenset", "dict")


class Frame:
    def __init__(
        self, flow: Flow, module: str, scopes: tuple[str, ...], function: str, owner: str | None, guards: int = 0
    ) -> None:
        self.flow, self.api, self.module, self.scopes = flow, flow.api, module, scopes
        self.function, self.owner, self.guards = function, owner, guards

    # --- statements

    def run(self, statements: Sequence[ast.stmt]) -> None:
        for index, statement in enumerate(statements):
            if isinstance(statement, ast.If):
                is_negative = isinstance(statement.test, ast.UnaryOp)
                has = self._is_guard(statement.test)
                with self._guarded(has and not is_negative):
                    self.run(statement.body)
                with self._guarded(has and is_negative):
                    self.run(statement.orelse)
                if has and is_negative and isinstance(statement.body[-1], ast.Return | ast.Raise):
                    with self._guarded(True):
                        self.run(statements[index + 1 :])
                    return
            else:
                getattr(self, f"_run_{type(statement).__name__}", self._run_any)(statement)

    def _is_guard(self, test: ast.expr) -> bool:
        return any(value.kind == "has" for value in self.value(test))

    @contextmanager
    def _guarded(self, is_guarded: bool) -> Iterator[None]:
        self.guards += is_guarded
        yield
        self.guards -= is_guarded

    def _run_any(self, statement: ast.AST) -> None:
        for _, field in ast.iter_fields(statement):
            parts = field if isinstance(field, list) else [field]
            for part in parts:
                if isinstance(part, ast.expr):
                    self.value(part)
                elif isinstance(part, ast.stmt):
                    self.run([part])
                elif isinstance(part, ast.ExceptHandler | ast.match_case | ast.withitem):
                    self._run_any(part)

    def _run_FunctionDef(self, node: ast.FunctionDef) -> None:
        for decorator in node.decorator_list:
            self.value(decorator)
        self.define(node, node.name)

    _run_AsyncFunctionDef = _run_FunctionDef

    def define(self, node: Any, name: str) -> Values:
        """A function of ours."""
        scope = self.scopes[0]
        owner = scope if scope in self.flow.classes and not isinstance(node, ast.Lambda) else None
        scopes = self.scopes[1:] if owner else self.scopes
        key = f"{scope}.{name}"
        self.flow.add_function(Function(key, self.module, scopes, node, owner))
        result = one("our function", key)
        self.flow.add(scope, name, result)
        return result

    def _run_ClassDef(self, node: ast.ClassDef) -> None:
        key = f"{self.scopes[0]}.{node.name}"
        self.flow.classes.setdefault(key, Class(key, self.scopes, node))
        self.flow.add(self.scopes[0], node.name, one("our class", key))
        Frame(self.flow, self.module, (key, *self.scopes), self.function, None, self.guards).run(node.body)

    def _run_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = node.module or ""
        if source == PACKAGE or source.startswith(f"{PACKAGE}."):
            path = source.removeprefix(PACKAGE).removeprefix(".")
            for alias in node.names:
                inner = f"{path}.{alias.name}".removeprefix(".")
                found = one("our module", inner) if inner in self.flow.trees else NOTHING
                self.flow.add(self.scopes[0], alias.asname or alias.name, found | self.flow.lookup([path], alias.name))

    def _run_Assign(self, node: ast.Assign) -> None:
        values = self.value(node.value)
        for target in node.targets:
            self.bind(target, values)

    def _run_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.bind(node.target, self.annotated(node.annotation) | (self.value(node.value) if node.value else NOTHING))

    def _run_AugAssign(self, node: ast.AugAssign) -> None:
        self.bind(node.target, self.value(node.value))

    def _run_For(self, node: ast.For) -> None:
        self.bind(node.target, self.items(self.value(node.iter)))
        self.run([*node.body, *node.orelse])

    def _run_With(self, node: ast.With) -> None:
        for item in node.items:
            values = self.value(item.context_expr)
            if item.optional_vars is not None:
                self.bind(item.optional_vars, values | self.items(values))
        self.run(node.body)

    def _run_Return(self, node: ast.Return) -> None:
        if node.value is not None:
            self.flow.add(self.function, "return", self.value(node.value))

    def bind(self, target: ast.expr, values: Values) -> None:
        if isinstance(target, ast.Name):
            self.flow.add(self.scopes[0], target.id, values)
        elif isinstance(target, ast.Tuple | ast.List):
            for index, part in enumerate(target.elts):
                self.bind(part, frozenset().union(*(at(value, index) for value in values)))
        elif isinstance(target, ast.Starred):
            self.bind(target.value, many(values))
        elif isinstance(target, ast.Subscript):
            self.value(target.slice)
            self.extend(target.value, values)
        elif isinstance(target, ast.Attribute):
            for base in self.value(target.value):
                self._write(base, target, values)

    def _write(self, base: Value, target: ast.Attribute, values: Values) -> None:
        if base.kind in ("instance", "class"):
            self.record("write", base.name, target.attr, target)
        elif base.kind in ("our instance", "our class"):
            self.flow.add(base.name, target.attr, values)
            for cls in self.flow.trt_bases(base.name):
                if (self.api.find(cls, target.attr) or [""])[0] == "properties":
                    self.record("write", cls, target.attr, target)

    def extend(self, container: ast.expr, values: Values) -> None:
        """``values`` are put into a container that has a name."""
        if isinstance(container, ast.Name | ast.Attribute):
            self.bind(container, many(values)) if values else self.value(container)

    def bind_parameters(self, function: Function) -> None:
        arguments = function.node.args
        if function.owner and "staticmethod" not in function.decorators:
            first = [*arguments.posonlyargs, *arguments.args][0]
            kind = "our class" if "classmethod" in function.decorators else "our instance"
            self.flow.add(function.key, first.arg, one(kind, function.owner))
            self._bind_override(function)
        for arg in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if arg.annotation is not None:
                self.flow.add(function.key, arg.arg, self.annotated(arg.annotation))
        defaults = [default for default in (*arguments.defaults, *arguments.kw_defaults) if default is not None]
        for default in defaults:
            self.value(default)

    def _bind_override(self, function: Function) -> None:
        """TensorRT calls a method of a class that derives from its own."""
        if function.name.startswith("__"):
            return
        for cls in self.flow.trt_bases(function.owner or ""):
            found = self.api.find(cls, function.name)
            if found is not None and found[0] == "methods":
                self.record("override", cls, function.name, function.node, len(function.parameters))
                for overload in found[1]:
                    for arg, documented in zip(function.parameters, overload["args"], strict=False):
                        self.flow.add(function.key, arg.arg, self.typed(documented.partition(": ")[2].rstrip("=")))

    def annotated(self, annotation: ast.expr) -> Values:
        """Instances of ours that an annotation names; the only module that one is about is TensorRT."""
        if isinstance(annotation, ast.Name) and annotation.id == "ModuleType":
            return one("module")
        if isinstance(annotation, ast.BinOp):
            return self.annotated(annotation.left) | self.annotated(annotation.right)
        if isinstance(annotation, ast.Subscript):
            parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
            return many(frozenset().union(*map(self.annotated, parts)))
        if isinstance(annotation, ast.Name | ast.Attribute):
            found = self.value(annotation)
            return frozenset(Value("our instance", value.name) for value in found if value.kind == "our class")
        return NOTHING

    def result(self, function: Function) -> Values:
        """What a function of ours gives: what it declares, if that is a class of ours."""
        declared = getattr(function.node, "returns", None)
        if isinstance(declared, ast.Name):
            frame = Frame(self.flow, function.module, function.scopes, function.key, None)
            return frame.annotated(declared) or self.flow.get(function.key, "return")
        return self.flow.get(function.key, "return")

    def typed(self, text: str) -> Values:
        """What a docstring says that something is."""
        shape, cls = parse_type(self.api, text)
        if cls is None:
            return NOTHING
        return many(one("instance", cls)) if shape == "many" else one("instance", cls)

    # --- uses

    def record(self, kind: str, owner: str | None, member: str, node: ast.AST, num_args: int = 0, **more: Any) -> None:
        if member.startswith("__") and member not in ("__init__", "__version__"):
            return
        where = f"{self.module}:{getattr(node, 'lineno', 0)}"
        use = Use(where, self.function, kind, owner, member, num_args, is_guarded=self.guards > 0, **more)
        self.flow.add_use(use)

    def asked(self, objects: Values, names: Values) -> Values:
        """What `hasattr` says of ``names``, if it asks TensorRT's ``objects``."""
        owners = [value.name or None for value in objects if value.kind in ("module", "class", "instance")]
        found = [name.name for name in names if name.kind == "text"] if owners else []
        self.flow.guards.update((owner, name) for owner in owners for name in found)
        return frozenset(Value("has", name) for name in found)

    def items(self, values: Values) -> Values:
        """What iteration gives."""
        found: set[Value] = set()
        for value in values:
            if value.kind in ("many", "pairs"):
                found |= frozenset().union(*value.items)
            elif value.kind == "instance":
                for member in ("__iter__", "__getitem__"):
                    for overload in self.api.overloads(value.name, member):
                        result = self.typed(overload["returns"]) if "slice" not in str(overload["args"]) else NOTHING
                        found |= self.items(result) if member == "__iter__" else result
        return frozenset(found)

    # --- expressions

    def value(self, node: ast.expr) -> Values:
        return getattr(self, f"_value_{type(node).__name__}", self._value_any)(node)

    def _value_any(self, node: ast.AST) -> Values:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.value(child)
            elif isinstance(child, ast.keyword | ast.FormattedValue):
                self.value(child.value)
        return NOTHING

    def _value_Constant(self, node: ast.Constant) -> Values:
        is_name = isinstance(node.value, str) and re.fullmatch(r"\w+", node.value)
        return one("text", str(node.value)) if is_name else NOTHING

    def _value_Name(self, node: ast.Name) -> Values:
        return self.flow.lookup(self.scopes, node.id)

    def _value_Attribute(self, node: ast.Attribute) -> Values:
        if node.attr == "trt":
            self.value(node.value)
            return one("module")
        return frozenset().union(*(self.attribute(base, node.attr, node) for base in self.value(node.value)))

    def attribute(self, base: Value, name: str, node: ast.AST) -> Values:
        """Read the attribute ``name``."""
        if base.kind == "module":
            self.record("read", None, name, node)
            kind = self.api.kind_of(name)
            return one(kind, name) if kind in ("class", "function") else NOTHING
        if base.kind in ("class", "instance"):
            return self._member(base, name, node)
        if base.kind == "our module":
            return self.flow.lookup([base.name], name)
        if base.kind in ("our instance", "our class"):
            return self._attribute_of_ours(base, name, node)
        return NOTHING

    def _member(self, base: Value, name: str, node: ast.AST) -> Values:
        self.record("read", base.name, name, node)
        kind, member = self.api.find(base.name, name) or ("", None)
        if kind == "methods":
            return one("function", name, base.name, base.kind == "class")
        if kind == "properties":
            return self.typed(member["type"])
        is_enum = base.name in self.api.classes and self.api.classes[base.name]["enum"]
        return one("instance", base.name) if kind == "values" and is_enum else NOTHING

    def _attribute_of_ours(self, base: Value, name: str, node: ast.AST) -> Values:
        function = self.flow.method(base.name, name)
        if function is not None:
            if function.is_property:
                self.flow.add_call(function.key, self.function, self.guards > 0)
                return self.result(function)
            return one("our function", function.key, base.name if base.kind == "our instance" else None)
        found = frozenset().union(*(self.flow.get(key, name) for key in self.flow.lineage(base.name)))
        for cls in self.flow.trt_bases(base.name) if not found else ():
            if self.api.find(cls, name):
                found |= self._member(Value("instance", cls), name, node)
        return found

    def _value_Subscript(self, node: ast.Subscript) -> Values:
        values, index = self.value(node.value), node.slice
        self.value(index)
        if isinstance(index, ast.Slice):
            return values
        if isinstance(index, ast.Constant) and isinstance(index.value, int):
            return frozenset().union(
                *(
                    at(value, index.value) if value.kind == "pairs" else self.items(frozenset([value]))
                    for value in values
                )
            )
        return self.items(values)

    def _value_Tuple(self, node: ast.Tuple) -> Values:
        if any(isinstance(part, ast.Starred) for part in node.elts):
            return self._value_List(node)
        return pairs([self.value(part) for part in node.elts])

    def _value_List(self, node: Any) -> Values:
        return many(frozenset().union(*map(self.value, node.elts)))

    _value_Set = _value_List

    def _value_Starred(self, node: ast.Starred) -> Values:
        return self.items(self.value(node.value))

    def _value_Dict(self, node: ast.Dict) -> Values:
        spread = [self.items(self.value(value)) for key, value in zip(node.keys, node.values, strict=True) if not key]
        for key in node.keys:
            if key is not None:
                self.value(key)
        kept = [self.value(value) for key, value in zip(node.keys, node.values, strict=True) if key]
        return many(frozenset().union(*spread, *kept))

    def _value_BinOp(self, node: ast.BinOp) -> Values:
        return self.value(node.left) | self.value(node.right)

    def _value_BoolOp(self, node: ast.BoolOp) -> Values:
        guard = isinstance(node.op, ast.And) and self._is_guard(node.values[0])
        with self._guarded(guard):
            return frozenset().union(*map(self.value, node.values))

    def _value_UnaryOp(self, node: ast.UnaryOp) -> Values:
        return self.value(node.operand)

    def _value_IfExp(self, node: ast.IfExp) -> Values:
        with self._guarded(self._is_guard(node.test)):
            body = self.value(node.body)
        return body | self.value(node.orelse)

    def _value_NamedExpr(self, node: ast.NamedExpr) -> Values:
        values = self.value(node.value)
        self.bind(node.target, values)
        return values

    def _value_Yield(self, node: ast.Yield) -> Values:
        if node.value is not None:
            self.flow.add(self.function, "return", many(self.value(node.value)))
        return NOTHING

    def _value_Await(self, node: ast.Await) -> Values:
        return self.value(node.value)

    def _value_Lambda(self, node: ast.Lambda) -> Values:
        return self.define(node, f"<{node.lineno},{node.col_offset}>")

    def _value_ListComp(self, node: Any) -> Values:
        scope = f"{self.scopes[0]}.<{node.lineno},{node.col_offset}>"
        inner = Frame(self.flow, self.module, (scope, *self.scopes), self.function, self.owner, self.guards)
        for generator in node.generators:
            inner.bind(generator.target, inner.items(inner.value(generator.iter)))
            for condition in generator.ifs:
                inner.value(condition)
        if isinstance(node, ast.DictComp):
            inner.value(node.key)
            return many(inner.value(node.value))
        return many(inner.value(node.elt))

    _value_SetComp = _value_GeneratorExp = _value_DictComp = _value_ListComp

    def _value_Call(self, node: ast.Call) -> Values:
        return call(self, node)


def at(value: Value, index: int) -> Values:
    if value.kind == "pairs":
        return value.items[index] if -len(value.items) <= index < len(value.items) else NOTHING
    return value.items[0] if value.kind == "many" else NOTHING
