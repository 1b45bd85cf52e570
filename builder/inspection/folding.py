"""Folds what is alike in several layers into one row."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

_LAYER = re.compile(r"\blayers\.(\d+)\.")
_MOST_LAYERS = 4
"""Layer numbers that a folded name lists."""

T = TypeVar("T")


@dataclass(frozen=True)
class Fold(Generic[T]):
    """Items that differ by their layer alone."""

    name: str
    """``layers.{0,1,2,4,..}.mlp.moe``, or the only item's name."""
    items: list[T]

    @property
    def first(self) -> T:
        return self.items[0]

    @property
    def label(self) -> str:
        return self.name if len(self.items) == 1 else f"{self.name} x{len(self.items)}"


def fold(items: Iterable[T], name_of: Callable[[T], str], key_of: Callable[[T], Hashable]) -> list[Fold[T]]:
    """The ``items`` by what their names are without the layer, and by ``key_of``, in the order of the first of each."""
    groups: dict[Hashable, list[T]] = {}
    for item in items:
        groups.setdefault((without_layer(name_of(item)), key_of(item)), []).append(item)
    return [Fold(_folded_name([name_of(item) for item in group]), group) for group in groups.values()]


def without_layer(name: str) -> str:
    return _LAYER.sub("layers.*.", name)


def _folded_name(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    layers = [match[1] for name in names if (match := _LAYER.search(name))]
    more = ",.." if len(layers) > _MOST_LAYERS else ""
    return _LAYER.sub(f"layers.{{{','.join(layers[:_MOST_LAYERS])}{more}}}.", names[0])
