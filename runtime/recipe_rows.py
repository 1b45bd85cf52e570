"""Rows of what a weight recipe gives, as a recipe that reads only those rows of its sources.

A row is an index of the first dim. So a table of 95 GiB is converted piece by piece, and a weight of any size is made
with little memory beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from qwen4exp_trt.errors import CheckpointError
from qwen4exp_trt.plugins.number_formats import FP8_BLOCK
from qwen4exp_trt.runtime.recipe_shapes import RecipeShapes
from qwen4exp_trt.runtime.specs import Literal, Source, SourceRows, Transform, WeightRecipe
from qwen4exp_trt.runtime.weights import name_from_dtype, sources_of, transform


class NotByRows(CheckpointError):
    """A recipe whose rows are not made of rows of its sources."""


def rows_of(recipe: WeightRecipe, start: int, stop: int, shapes: RecipeShapes) -> WeightRecipe:
    """A recipe of rows ``start`` to ``stop``, at least one, of ``recipe``; `NotByRows` where there is none."""
    shape = shapes.shape(recipe)
    assert shape and 0 <= start < stop <= shape[0], f"rows {start} to {stop} of shape {shape}"
    if (start, stop) == (0, shape[0]):
        return recipe
    if isinstance(recipe, SourceRows):
        return SourceRows(recipe.name, recipe.start + start, recipe.start + stop)
    if isinstance(recipe, Source):
        return SourceRows(recipe.name, start, stop)
    if isinstance(recipe, Literal):
        width = math.prod(shape[1:])
        return Literal(recipe.dtype, (stop - start, *shape[1:]), recipe.values[start * width : stop * width])
    if recipe.op not in _RULES:
        raise _not_by_rows(recipe, f"{recipe.op!r} is not made row by row")
    return _RULES[recipe.op](recipe, start, stop, shapes)


def _not_by_rows(recipe: Transform, why: str) -> NotByRows:
    names = sources_of(recipe)
    return NotByRows(f"rows of a weight of {names[0] if names else 'constants'} cannot be read alone: {why}")


def _elementwise(recipe: Transform, start: int, stop: int, shapes: RecipeShapes) -> WeightRecipe:
    return replace(recipe, inputs=(rows_of(recipe.inputs[0], start, stop, shapes),))


def _view(recipe: Transform, start: int, stop: int, shapes: RecipeShapes) -> WeightRecipe:
    inner = recipe.inputs[0]
    if len(shapes.shape(inner)) == 1 and shapes.dtype(inner).itemsize != shapes.dtype(recipe).itemsize:
        raise _not_by_rows(recipe, "a view in elements of another size has other rows")
    return _elementwise(recipe, start, stop, shapes)


def _concat(recipe: Transform, start: int, stop: int, shapes: RecipeShapes) -> WeightRecipe:
    shape, dtype = shapes(recipe)
    dim = recipe.attr["dim"] % len(shape)
    if dim != 0:
        return replace(recipe, inputs=tuple(rows_of(part, start, stop, shapes) for part in recipe.inputs))
    found, begin = [], 0
    for part in recipe.inputs:
        end = begin + shapes.shape(part)[0]
        if begin < stop and start < end:
            rows = rows_of(part, max(start - begin, 0), min(stop, end) - begin, shapes)
            found.append(as_dtype(rows, dtype, shapes))
        begin = end
    return _joined(found)


def as_dtype(recipe: WeightRecipe, dtype: torch.dtype, shapes: RecipeShapes) -> WeightRecipe:
    """``recipe``, cast if it gives another dtype: the dtype of a join depends on all its parts."""
    return recipe if shapes.dtype(recipe) == dtype else transform("cast", recipe, dtype=name_from_dtype(dtype))


def _joined(parts: Sequence[WeightRecipe]) -> WeightRecipe:
    return parts[0] if len(parts) == 1 else transform("concat", *parts, dim=0)


def _stack(recipe: Transform, start: int, stop: int, shapes: RecipeShapes) -> WeightRecipe:
    dtype = shapes.dtype(recipe)
    return replace(recipe, inputs=tuple(as_dtype(part, dtype, shapes) for part in recipe.inputs[start:stop]))


def _reshape(recipe: Transform, start: int, stop: int, shapes: RecipeShapes) -> WeightRecipe:
    inner, shape = recipe.inputs[0], shapes.shape(recipe)
    if shapes.shape(inner)[:1] != shape[:1]:
        raise _not_by_rows(recipe, f"a reshape makes {list(shape)} of {list(shapes.shape(inner))}")
    return transform("reshape", rows_of(inner, start, stop, shapes), shape=(stop - start, *shape[1:]))


def _expand(recipe: Transform, start: int, stop: int, shapes: RecipeShapes) -> WeightRecipe:
    inner, shape = recipe.inputs[0], shapes.shape(recipe)
    found = shapes.shape(inner)
    is_repeated = len(found) < len(shape) or found[0] == 1
    rows = inner if is_repeated else rows_of(inner, start, stop, shapes)
    return transform("expand", rows, shape=(stop - start, *shape[1:]))


def _dequantize_fp8(recipe: Transform, start: int, stop: int, shapes: RecipeShapes) -> WeightRecipe:
    weight, scale = recipe.inputs
    if shapes.num_elements(scale) != 1:
        raise _not_by_rows(recipe, f"it has scales {list(shapes.shape(scale))} instead of one")
    return replace(recipe, inputs=(rows_of(weight, start, stop, shapes), scale))


def _dequantize_fp8_blocks(recipe: Transform, start: int, stop: int, shapes: RecipeShapes) -> WeightRecipe:
    weight, scales = recipe.inputs
    if len(shapes.shape(weight)) > 2:
        return replace(recipe, inputs=tuple(rows_of(part, start, stop, shapes) for part in recipe.inputs))
    parts = []
    for begin, end in _cut(start, stop, FP8_BLOCK):
        blocks = rows_of(scales, begin // FP8_BLOCK, -(-end // FP8_BLOCK), shapes)
        parts.append(replace(recipe, inputs=(rows_of(weight, begin, end, shapes), blocks)))
    return _joined(parts)


def _dequantize_nvfp4(recipe: Transform, start: int, stop: int, shapes: RecipeShapes) -> WeightRecipe:
    """Each of the last dim of scales belongs to an equal group of the rows of a matrix."""
    packed, block_scales, scales = recipe.inputs
    (num_rows, *inner), found = shapes.shape(packed), shapes.shape(scales)
    if len(inner) > 1:
        has_outer = len(found) == len(inner) and found[0] == num_rows
        outer = rows_of(scales, start, stop, shapes) if has_outer else scales
        return replace(recipe, inputs=(*(rows_of(part, start, stop, shapes) for part in (packed, block_scales)), outer))
    if len(found) > 1:
        raise _not_by_rows(recipe, f"it has scales {list(found)} for a matrix")
    group = num_rows // math.prod(found)
    parts = []
    for begin, end in _cut(start, stop, group):
        groups = rows_of(scales, begin // group, -(-end // group), shapes) if found else scales
        codes, blocks = (rows_of(part, begin, end, shapes) for part in (packed, block_scales))
        parts.append(replace(recipe, inputs=(codes, blocks, groups)))
    return _joined(parts)


def selected_rows(recipe: Transform, start: int, stop: int, shapes: RecipeShapes) -> WeightRecipe:
    """Rows ``start`` to ``stop`` of a ``select_rows``: the runs of neighbours among them, joined."""
    inner, indices = recipe.inputs
    if not isinstance(indices, Literal):
        raise _not_by_rows(recipe, "which rows are selected is no constant")
    rows = [int(index) for index in indices.values[start:stop]]
    first = [0, *(at for at in range(1, len(rows)) if rows[at] != rows[at - 1] + 1), len(rows)]
    return _joined([rows_of(inner, rows[begin], rows[end - 1] + 1, shapes) for begin, end in pairwise(first)])


def _cut(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Rows that each lie within one group of ``size`` rows, or are whole groups."""
    first, last = -(-start // size) * size, stop // size * size
    yield from pairwise(sorted({start, stop, *(bound for bound in (first, last) if start < bound < stop)}))


_RULES: dict[str, Callable[[Transform, int, int, RecipeShapes], WeightRecipe]] = {
    "cast": _elementwise,
    "add": _elementwise,
    "mul": _elementwise,
    "view": _view,
    "check_block_scales": _elementwise,
    "concat": _concat,
    "stack": _stack,
    "reshape": _reshape,
    "expand": _expand,
    "select_rows": selected_rows,
    "dequantize_fp8": _dequantize_fp8,
    "dequantize_fp8_blocks": _dequantize_fp8_blocks,
    "dequantize_nvfp4": _dequantize_nvfp4,
}
"""Transform name -> how its rows are made of rows of its inputs; of a transform without, rows cannot be read alone."""
