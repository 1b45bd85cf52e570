"""The small language in which specs state dims: names, ints and ``+ - * //``, as in ``"2*HK*K + HV*V"``.

The same expression is evaluated over ints (a real call), SymInts (tracing) and TensorRT dimension expressions (shape
inference inside an engine), so an op's shapes are stated once.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping
from functools import cache
from typing import Any

Dim = int | str

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv}


@cache
def _parse(expression: str) -> ast.expr:
    return ast.parse(expression, mode="eval").body


def is_name(dim: Dim) -> bool:
    """True for a bare symbol such as ``T``, which an input's shape binds."""
    return isinstance(dim, str) and dim.isidentifier()


def ceil_div(dim: str, divisor: int) -> str:
    """The expression of ``dim / divisor`` rounded up."""
    return f"({dim} + {divisor - 1})//{divisor}"


def names_in(dim: Dim) -> set[str]:
    """The symbols that ``dim`` mentions."""
    if isinstance(dim, int):
        return set()
    return {node.id for node in ast.walk(_parse(dim)) if isinstance(node, ast.Name)}


def evaluate(dim: Dim, values: Mapping[str, Any]) -> Any:
    """``dim`` with its symbols taken from ``values``; ints stay ints."""
    return dim if isinstance(dim, int) else _evaluate(_parse(dim), values)


def _evaluate(node: ast.expr, values: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Name):
        return values[node.id]
    if isinstance(node, ast.Constant):
        return node.value
    assert isinstance(node, ast.BinOp), ast.dump(node)
    return _OPERATORS[type(node.op)](_evaluate(node.left, values), _evaluate(node.right, values))
