"""Cuts a weight recipe into pieces: small recipes, each with the part of the result that it fills."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import Tensor

from qwen4exp_trt.plugins.number_formats import FP8_BLOCK
from qwen4exp_trt.runtime.recipe_rows import NotByRows, as_dtype, rows_of, selected_rows
from qwen4exp_trt.runtime.recipe_shapes import RecipeShapes
from qwen4exp_trt.runtime.specs import Literal, Source, Transform, WeightRecipe

_PIECE_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 22}
"""By the device that computes: what fits the caches of a CPU core, and what keeps a GPU busy. Dequantizing takes up to
24 bytes an element."""
_JOINS = ("concat", "stack")
_ELEMENTWISE = ("cast", "add", "mul", "view", "check_block_scales")


@dataclass(frozen=True)
class Piece:
    """``target`` is a part of the result, of the shape that ``recipe`` gives; copying into it casts."""

    recipe: WeightRecipe
    target: Tensor

    def sources(self) -> list[Source]:
        """The sources of the recipe, in the order of evaluation."""
        return list(_sources(self.recipe))

    @property
    def num_bytes(self) -> int:
        return self.target.numel() * self.target.element_size()


def _sources(recipe: WeightRecipe) -> Iterator[Source]:
    if isinstance(recipe, Source):
        yield recipe
    elif isinstance(recipe, Transform):
        for part in recipe.inputs:
            yield from _sources(part)


def pieces_of(recipe: WeightRecipe, target: Tensor, shapes: RecipeShapes) -> Iterator[Piece]:
    """Pieces that fill ``target`` with ``recipe``, cast to its dtype.

    Each part of a join is placed where it belongs; a weight that is not a join is cut into groups of rows if its
    transforms allow it.
    """
    recipe = with_joins_outside(recipe, shapes)
    if not isinstance(recipe, Transform):
        yield from _groups_of_rows(recipe, target, shapes)
    elif recipe.op in _JOINS:
        yield from _pieces_of_join(recipe, target, shapes)
    elif recipe.op == "reshape" and target.is_contiguous():
        inner = recipe.inputs[0]
        yield from pieces_of(inner, target.view(shapes.shape(inner)), shapes)
    elif recipe.op == "view" and target.dtype == shapes.dtype(recipe) and _keeps_size(recipe, shapes):
        inner = recipe.inputs[0]
        yield from pieces_of(inner, target.view(shapes.dtype(inner)), shapes)
    else:
        yield from _groups_of_rows(recipe, target, shapes)


def _pieces_of_join(join: Transform, target: Tensor, shapes: RecipeShapes) -> Iterator[Piece]:
    joined, start = shapes.dtype(join), 0
    for index, part in enumerate(join.inputs):
        if target.dtype != joined:
            part = as_dtype(part, joined, shapes)
        if join.op == "stack":
            place = target[index]
        else:
            dim = join.attr["dim"]
            extent = shapes.shape(part)[dim]
            place = target.narrow(dim, start, extent)
            start += extent
        yield from pieces_of(part, place, shapes)


def _groups_of_rows(recipe: WeightRecipe, target: Tensor, shapes: RecipeShapes) -> Iterator[Piece]:
    rows = len(target) if target.ndim else 1
    at_once = max(_PIECE_ELEMENTS[target.device.type] * rows // max(target.numel(), 1), 1)
    if at_once >= rows or isinstance(recipe, Literal):
        yield Piece(recipe, target)
        return
    if at_once > FP8_BLOCK:
        at_once -= at_once % FP8_BLOCK
    bounds = [(start, min(start + at_once, rows)) for start in range(0, rows, at_once)]
    try:
        groups = [rows_of(recipe, start, stop, shapes) for start, stop in bounds]
    except NotByRows:
        yield Piece(recipe, target)
        return
    for (start, stop), group in zip(bounds, groups, strict=True):
        yield Piece(group, target[start:stop])


def with_joins_outside(recipe: WeightRecipe, shapes: RecipeShapes) -> WeightRecipe:
    """``recipe`` with its elementwise transforms moved into the joins and reshapes that they follow.

    A cast of a stack is the stack of casts; so what is behind a join needs no memory for all of it. A selection of rows
    is a join of those rows, so that no others are read.
    """
    if isinstance(recipe, Transform) and recipe.op == "select_rows":
        with suppress(NotByRows):
            return selected_rows(recipe, 0, shapes.shape(recipe)[0], shapes)
    if not isinstance(recipe, Transform) or recipe.op not in _ELEMENTWISE:
        return recipe
    inner = with_joins_outside(recipe.inputs[0], shapes)
    if recipe.op == "cast" and shapes.dtype(inner) == shapes.dtype(recipe):
        return inner
    if isinstance(inner, Transform) and _keeps_size(recipe, shapes):
        if inner.op == "reshape":
            return replace(inner, inputs=(replace(recipe, inputs=inner.inputs),))
        if inner.op in _JOINS:
            parts = [as_dtype(part, shapes.dtype(inner), shapes) for part in inner.inputs]
            return replace(inner, inputs=tuple(replace(recipe, inputs=(part,)) for part in parts))
    return replace(recipe, inputs=(inner,))


def _keeps_size(recipe: Transform, shapes: RecipeShapes) -> bool:
    """False for a view in elements of another size, which changes a shape."""
    return recipe.op != "view" or shapes.dtype(recipe).itemsize == shapes.dtype(recipe.inputs[0]).itemsize
