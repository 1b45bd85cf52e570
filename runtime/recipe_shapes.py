"""Shapes and dtypes of what weight recipes give, from those of their sources alone."""

from __future__ import annotations

import math
from typing import Any

import torch

from qwen4exp_trt.runtime.specs import Literal, Source, SourceRows, WeightRecipe
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
            metas = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in inputs]
            result = apply_transform(recipe, metas)
            self._by_inputs[key] = (tuple(result.shape), result.dtype)
        return self._by_inputs[key]
