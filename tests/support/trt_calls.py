"""What calls do with the values that `trt_frame` follows."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from trt_api import UNKNOWN
from trt_values import NOTHING, Value, Values, many, one, pairs

if TYPE_CHECKING:
    from trt_frame import Frame

_SAME_ITEMS = ("list", "tuple", "sorted", "iter", "reversed", "set", "frozenset", "dict", "filter")
_SPREAD = 8
_ADDERS = ("append", "add", "extend", "update", "setdefault")
_OF_CONTAINERS = (*_ADDERS, "get", "pop", "popitem", "values", "items", "copy")


def call(frame: Frame, node: ast.Call) -> Values:
    args = [values for arg in node.args for values in _spread(frame, arg)]
    keywords = {keyword.arg: frame.value(keyword.value) for keyword in node.keywords}
    if isinstance(node.func, ast.Name) and not frame.flow.lookup(frame.scopes, node.func.id):
        return _call_builtin(frame, node.func.id, node, args)
    found: set[Value] = set()
    if isinstance(node.func, ast.Attribute) and node.func.attr in _OF_CONTAINERS:
        found |= _call_container(frame, node.func, args)
    for function in frame.value(node.func):
        if function.kind in ("class", "function"):
            found |= _call_theirs(frame, function, node, args)
        elif function.kind == "our class":
            found |= _make_ours(frame, function, args, keywords)
        elif function.kind == "our function":
            found |= call_ours(frame, function, args, keywords)
    return frozenset(found)


def _spread(frame: Frame, arg: ast.expr) -> list[Values]:
    """The values of an argument by place; those behind a ``*`` of unknown length may be in any."""
    if not isinstance(arg, ast.Starred):
        return [frame.value(arg)]
    values = frame.value(arg.value)
    tuples = [value.items for value in values if value.kind == "pairs"]
    if len(tuples) < len(values) or not tuples:
        return [frame.items(values)] * _SPREAD
    return [frozenset().union(*place) for place in zip_longest(*tuples, fillvalue=NOTHING)]


def _call_theirs(frame: Frame, function: Value, node: ast.Call, args: Sequence[Values]) -> Values:
    owner, member = (function.name, "__init__") if function.kind == "class" else (function.owner, function.name)
    is_open = any(isinstance(arg, ast.Starred) for arg in node.args) or any(not word.arg for word in node.keywords)
    num_args = sum(not isinstance(arg, ast.Starred) for arg in node.args) - function.is_unbound
    keywords = tuple(word.arg for word in node.keywords if word.arg)
    frame.record("call", owner, member, node, num_args, keywords=keywords, is_open=is_open)
    if function.kind == "class":
        return one("instance", function.name)
    overloads = frame.api.overloads(owner, member)
    return frozenset().union(*(frame.typed(overload["returns"]) for overload in overloads))


def _make_ours(frame: Frame, cls: Value, args: Sequence[Values], keywords: dict[str | None, Values]) -> Values:
    flow = frame.flow
    flow.add_call(cls.name, frame.function, frame.guards > 0)
    made = one("our instance", cls.name)
    init = flow.method(cls.name, "__init__")
    if init is not None:
        call_ours(frame, Value("our function", init.key, cls.name), args, keywords)
        return made
    bodies = [flow.classes[key].node.body for key in reversed(flow.lineage(cls.name)) if key in flow.classes]
    fields = [part.target for body in bodies for part in body if isinstance(part, ast.AnnAssign)]
    names = [field.id for field in fields if isinstance(field, ast.Name)]
    for name, values in [*zip(names, args, strict=False), *keywords.items()]:
        if name is not None:
            flow.add(cls.name, name, values)
    return made


def call_ours(frame: Frame, function: Value, args: Sequence[Values], keywords: dict[str | None, Values]) -> Values:
    flow, ours = frame.flow, frame.flow.functions[function.name]
    flow.add_call(ours.key, frame.function, frame.guards > 0)
    parameters = ours.parameters
    given = args[1:] if ours.owner and function.owner is None and args else args
    for parameter, values in zip(parameters, given, strict=False):
        flow.add(ours.key, parameter.arg, values)
    rest = ours.node.args.vararg
    if rest is not None:
        flow.add(ours.key, rest.arg, many(frozenset().union(*given[len(parameters) :])))
    for name, values in keywords.items():
        if name is not None:
            flow.add(ours.key, name, values)
    return frame.result(ours)


def _call_container(frame: Frame, method: ast.Attribute, args: Sequence[Values]) -> Values:
    values = frozenset(value for value in frame.value(method.value) if value.kind in ("many", "pairs"))
    if method.attr in _ADDERS:
        added = frozenset().union(*args)
        frame.extend(method.value, frame.items(added) if method.attr in ("extend", "update") else added)
    if method.attr == "items":
        return many(pairs([NOTHING, frame.items(values)]))
    return values if method.attr in ("values", "copy") else frame.items(values)


def _call_builtin(frame: Frame, name: str, node: ast.Call, args: Sequence[Values]) -> Values:
    if name == "getattr" and len(args) > 1:
        return _getattr(frame, node, args)
    if name == "hasattr":
        return frame.asked(args[0], args[1])
    if name == "super":
        return one("our instance", frame.owner) if frame.owner else NOTHING
    if name == "zip":
        return many(pairs([frame.items(arg) for arg in args]))
    if name == "enumerate":
        return many(pairs([NOTHING, frame.items(args[0])]))
    if name == "map":
        inner = [frame.items(arg) for arg in args[1:]]
        ours = [value for value in args[0] if value.kind == "our function"]
        return many(frozenset().union(*(call_ours(frame, value, inner, {}) for value in ours)))
    if name in ("next", "max", "min"):
        return frozenset().union(frame.items(args[0]), *args[1:])
    if name in _SAME_ITEMS and args:
        return many(frame.items(args[-1]))
    return args[1] if name == "cast" else NOTHING


def _getattr(frame: Frame, node: ast.Call, args: Sequence[Values]) -> Values:
    texts = [value.name for value in args[1] if value.kind == "text"]
    found: set[Value] = set()
    for base in args[0]:
        if base.kind in ("module", "class", "instance") and not texts:
            frame.record("read", UNKNOWN, "getattr", node)
        for text in texts:
            found |= frame.attribute(base, text, node)
    return frozenset(found)
