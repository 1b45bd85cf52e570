"""Shapes and dtypes of what weight recipes give, from those of their sources alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from qwen4exp_trt.runtime.specs import Literal, Source, SourceRows, Transform, WeightRecipe
from qwen4exp_trt.runtime.tensor_source import Described, TensorSource
from qwen4exp_trt.runtime.weights import apply_transform, literal_tensor


class RecipeShapes:
    """Describes recipes over the tensors of ``source``, each once: a stack of experts has thousands of parts."""

    def __init__(self, source: TensorSource) -> None:
        self._source = source
        self._by_recipe: dict[int, tuple[WeightRecipe, Described]] = {}
        """By identity, since comparing trees takes long; keeps the recipe, so that its identity stays its own."""
        self._by_inputs: dict[Any, Described] = {}

    def __call__(self, recipe: WeightRecipe) -> Described:
        """What ``recipe`` gives. Raises what its transforms raise for operands that do not fit them."""
        if id(recipe) not in self._by_recipe:
            self._by_recipe[id(recipe)] = (recipe, self._describe(recipe))
        return self._by_recipe[id(recipe)][1]

    def shape(self, recipe: WeightRecipe) -> tuple[int, ...]:
        return self(recipe)[0]

    def dtype(self, recipe: WeightRecipe) -> torch.dtype:
        return self(recipe)[1]

    def num_elements(self, recipe: WeightRecipe) -> int:
        return math.prod(self.shape(recipe))

    def _describe(self, recipe: WeightRecipe) -> Described:
        if isinstance(recipe, Source):
            shape, dtype = self._source.describe(recipe.name)
            return (recipe.stop - recipe.start, *shape[1:]) if isinstance(recipe, SourceRows) else shape, dtype
        if isinstance(recipe, Literal):
            value = literal_tensor(recipe)
            return tuple(value.shape), value.dtype
        inputs = tuple(self(part) for part in recipe.inputs)
        key = (recipe.op, recipe.attrs, inputs)
        if key not in self._by_inputs:
            self._by_inputs[key] = _RULES.get(recipe.op, _describe_by_meta)(recipe, inputs)
        return self._by_inputs[key]


def _describe_by_meta(recipe: Transform, inputs: Sequence[Described]) -> Described:
    metas = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in inputs]
    result = apply_transform(recipe, metas)
    return tuple(result.shape), result.dtype


def _describe_sum(recipe: Transform, inputs: Sequence[Described]) -> Described:
    ((shape, dtype),) = inputs
    return shape, apply_transform(recipe, [torch.empty((0,) * len(shape), dtype=dtype)]).dtype


def _describe_concat(recipe: Transform, inputs: Sequence[Described]) -> Described:
    dim = range(len(inputs[0][0]))[recipe.attr["dim"]]
    rest, *others = [(shape[:dim], shape[dim + 1 :]) for shape, _ in inputs]
    if any(other != rest for other in others):
        raise ValueError(f"tensors of shapes {[list(shape) for shape, _ in inputs]} are concatenated in dim {dim}")
    shape = (*rest[0], sum(shape[dim] for shape, _ in inputs), *rest[1])
    return shape, reduce(torch.promote_types, (dtype for _, dtype in inputs))


def _describe_stack(recipe: Transform, inputs: Sequence[Described]) -> Described:
    shape, *others = [shape for shape, _ in inputs]
    if any(other != shape for other in others):
        raise ValueError(f"tensors of shapes {[list(shape) for shape, _ in inputs]} are stacked")
    return (len(inputs), *shape), reduce(torch.promote_types, (dtype for _, dtype in inputs))


_RULES: dict[str, Callable[[Transform, Sequence[Described]], Described]] = {
    "add": _describe_sum,
    "concat": _describe_concat,
    "stack": _describe_stack,
}
"""Of transforms whose meta kernels import torch's compiler, which takes longer than loading a small model."""
