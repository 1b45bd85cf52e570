"""Reads single rows of what a weight recipe gives, wherever in the files they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from qwen4exp_trt.errors import CheckpointError
from qwen4exp_trt.runtime.materialize import materialize
from qwen4exp_trt.runtime.recipe_pieces import with_joins_outside
from qwen4exp_trt.runtime.recipe_rows import NotByRows, as_dtype
from qwen4exp_trt.runtime.recipe_shapes import RecipeShapes
from qwen4exp_trt.runtime.row_files import FailedRowsError
from qwen4exp_trt.runtime.specs import Source, SourceRows, Transform, WeightRecipe
from qwen4exp_trt.runtime.tensor_source import RowReader, TensorSource
from qwen4exp_trt.runtime.weights import apply_transform

_ROW_BY_ROW = {
    "cast": 1,
    "add": 1,
    "mul": 1,
    "view": 1,
    "check_block_scales": 1,
    "dequantize_fp8": 1,
    "dequantize_nvfp4": 2,
}
"""Transform -> how many of its inputs have the rows of the result; the others have one element for all rows."""


class RowTable:
    """The rows of ``recipe`` over the tensors of ``source``, a matrix that may be joined of shards in any order.

    Shards of one form (their dtype, what is done to them) are read together. `CheckpointError` for a recipe whose rows
    are not made of one row of each of its tensors.
    """

    def __init__(self, recipe: WeightRecipe, source: TensorSource) -> None:
        shapes = RecipeShapes(source)
        self._shape, self._dtype = shapes(recipe)
        parts = list(_parts_of(recipe, shapes))
        self._ends = np.array(list(accumulate(shapes.shape(part)[0] for part in parts)))
        self._forms: list[_Form] = []
        places: list[tuple[int, int]] = []
        forms: dict[tuple[WeightRecipe, tuple[torch.dtype, ...]], _Form] = {}
        for part in parts:
            leaves: list[str] = []
            template = _template(part, leaves, shapes)
            key = template, tuple(shapes.dtype(Source(name)) for name in leaves)
            if key not in forms:
                forms[key] = _Form(template)
                self._forms.append(forms[key])
            form = forms[key]
            places.append((self._forms.index(form), len(form.leaves)))
            form.leaves.append(leaves)
        self._form_of, self._index_of = np.array(places).T
        for form in self._forms:
            form.open(source)

    def read(self, rows: np.ndarray) -> Tensor:
        """``[n, ...]`` on the CPU, for int64 row ids ``[n]`` that are below the number of rows.

        `FailedRowsError` if some cannot be read.
        """
        if len(self._forms) == 1:
            (_, form, indices, local) = next(self._located(rows))
            return form.read(indices, local)
        out = torch.empty((len(rows), *self._shape[1:]), dtype=self._dtype)
        failures: dict[int, CheckpointError] = {}
        for places, form, indices, local in self._located(rows):
            try:
                out.view(torch.uint8)[places] = form.read(indices, local).view(torch.uint8)
            except FailedRowsError as error:
                failures |= {int(places[place]): failure for place, failure in error.failures.items()}
        if failures:
            raise FailedRowsError(failures)
        return out

    def forget(self, rows: np.ndarray) -> None:
        """See to it that the next read of these rows asks the disk."""
        for _, form, indices, local in self._located(rows):
            for reader in form.readers:
                reader.forget(indices, local)

    @property
    def readers(self) -> list[RowReader]:
        """What reads the tensors."""
        return [reader for form in self._forms for reader in form.readers]

    @property
    def num_rows(self) -> int:
        return self._shape[0]

    def _located(self, rows: np.ndarray) -> Iterator[tuple[np.ndarray, _Form, np.ndarray, np.ndarray]]:
        """By form: the places in ``rows`` of those that it has, which of its shards has each, and which row of it."""
        parts = np.searchsorted(self._ends, rows, side="right")
        local = rows - np.concatenate([[0], self._ends])[parts]
        forms, indices = self._form_of[parts], self._index_of[parts]
        for number, form in enumerate(self._forms):
            places = np.flatnonzero(forms == number)
            if len(places) or len(self._forms) == 1:
                yield places, form, indices[places], local[places]


@dataclass
class _Form:
    """Shards that are made alike."""

    template: WeightRecipe
    """One row of a shard; its tensors are named by their number."""
    leaves: list[list[str]] = field(default_factory=list)
    """The names of the tensors of each shard."""
    readers: list[RowReader] = field(default_factory=list)
    constants: dict[WeightRecipe, Tensor] = field(default_factory=dict)

    def open(self, source: TensorSource) -> None:
        self.readers = [source.row_reader(names) for names in zip(*self.leaves, strict=True)]
        for constant in _constants_of(self.template):
            self.constants[constant] = materialize(constant, source)

    def read(self, shards: np.ndarray, rows: np.ndarray) -> Tensor:
        return self._evaluate(self.template, [reader.read(shards, rows) for reader in self.readers])

    def _evaluate(self, recipe: WeightRecipe, rows: list[Tensor]) -> Tensor:
        if recipe in self.constants:
            return self.constants[recipe]
        if isinstance(recipe, SourceRows):
            return rows[int(recipe.name)]
        assert isinstance(recipe, Transform)
        return apply_transform(recipe, [self._evaluate(part, rows) for part in recipe.inputs])


def _parts_of(recipe: WeightRecipe, shapes: RecipeShapes) -> Iterator[WeightRecipe]:
    """The shards that ``recipe`` joins, with what is done to all of them done to each."""
    recipe = with_joins_outside(recipe, shapes)
    dims = len(shapes.shape(recipe))
    if not isinstance(recipe, Transform) or recipe.op != "concat" or recipe.attr["dim"] not in (0, -dims):
        yield recipe
        return
    dtype = shapes.dtype(recipe)
    for part in recipe.inputs:
        yield from _parts_of(as_dtype(part, dtype, shapes), shapes)


def _template(recipe: WeightRecipe, leaves: list[str], shapes: RecipeShapes) -> WeightRecipe:
    """``recipe`` of one row; the names of the tensors that give a row of theirs are added to ``leaves``."""
    if isinstance(recipe, Source):
        leaves.append(recipe.name)
        return SourceRows(str(len(leaves) - 1), 0, 1)
    if not isinstance(recipe, Transform) or recipe.op not in _ROW_BY_ROW:
        raise NotByRows("a table whose rows are read one by one has rows that depend on others, or none")
    count = _ROW_BY_ROW[recipe.op]
    rows, others = recipe.inputs[:count], recipe.inputs[count:]
    if any(shapes.num_elements(other) != 1 for other in others):
        raise NotByRows(f"{recipe.op} of a table whose rows are read one by one has several scales")
    return replace(recipe, inputs=(*(_template(part, leaves, shapes) for part in rows), *others))


def _constants_of(template: WeightRecipe) -> Iterator[WeightRecipe]:
    """What is the same for all rows."""
    if isinstance(template, Transform):
        count = _ROW_BY_ROW[template.op]
        yield from template.inputs[count:]
        for part in template.inputs[:count]:
            yield from _constants_of(part)
