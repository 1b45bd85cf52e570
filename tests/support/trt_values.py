"""What `trt_flow` knows of a value."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Value:
    """``kind``: of TensorRT module, class, instance or function (``owner``: of a method; ``is_unbound``: taken from the
    class); of ours: our module, our class, our instance, our function (``name`` is a key, ``owner`` the class of a
    bound method); many (``items[0]``), pairs (``items`` by place), text; has, what `hasattr` says of ``name``."""

    kind: str
    name: str = ""
    owner: str | None = None
    items: tuple[frozenset[Value], ...] = ()
    is_unbound: bool = False


Values = frozenset[Value]
NOTHING: Values = frozenset()


def one(kind: str, name: str = "", owner: str | None = None, is_unbound: bool = False) -> Values:
    return frozenset([Value(kind, name, owner, is_unbound=is_unbound)])


def many(items: Iterable[Value]) -> Values:
    """Any iterable of ``items``. What is nested deeply is left out, so that sets stay finite."""
    inner = frozenset(item for item in items if _depth(item) < 3)
    return frozenset([Value("many", items=(inner,))]) if inner else NOTHING


def pairs(parts: Iterable[Values]) -> Values:
    """A tuple."""
    kept = tuple(frozenset(item for item in part if _depth(item) < 3) for part in parts)
    return frozenset([Value("pairs", items=kept)]) if any(kept) else NOTHING


def _depth(value: Value) -> int:
    return 1 + max((_depth(each) for part in value.items for each in part), default=0) if value.items else 0


@dataclass(frozen=True)
class Function:
    """One of ours. ``scopes``: where its names are looked up, behind its own."""

    key: str
    module: str
    scopes: tuple[str, ...]
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    owner: str | None

    @property
    def name(self) -> str:
        return self.key.rpartition(".")[2]

    @property
    def decorators(self) -> list[str]:
        return [ast.unparse(each) for each in getattr(self.node, "decorator_list", [])]

    @property
    def is_property(self) -> bool:
        return bool({"property", "cached_property"} & set(self.decorators))

    @property
    def parameters(self) -> list[ast.arg]:
        """Without self."""
        args = [*self.node.args.posonlyargs, *self.node.args.args]
        return args[1:] if self.owner and "staticmethod" not in self.decorators else args


@dataclass(frozen=True)
class Class:
    """One of ours."""

    key: str
    scopes: tuple[str, ...]
    node: ast.ClassDef
