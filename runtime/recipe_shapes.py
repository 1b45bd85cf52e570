"""Shapes and dtypes of what weight recipes give, from those of their sources alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from qwen4exp_trt.errors import CheckpointError, PluginError
from qwen4exp_trt.plugins.number_formats import check_fp8_block_shapes, check_nvfp4_shapes
from qwen4exp_trt.runtime.specs import Literal, Source, SourceRows, Transform, WeightRecipe
from qwen4exp_trt.runtime.tensor_source import Described, TensorSource
from qwen4exp_trt.runtime.weights import apply_transform, literal_tensor, sources_of


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
            try:
                self._by_inputs[key] = _RULES.get(recipe.op, _describe_by_meta)(recipe, inputs)
            except (ValueError, PluginError) as error:
                raise CheckpointError(f"{', '.join(sources_of(recipe))}: {error}") from error
        return self._by_inputs[key]


def _describe_by_meta(recipe: Transform, inputs: Sequence[Described]) -> Described:
    result = apply_transform(recipe, _metas(inputs))
    return tuple(result.shape), result.dtype


def _metas(inputs: Sequence[Described]) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in inputs]


def _describe_same(recipe: Transform, inputs: Sequence[Described]) -> Described:
    return inputs[0]


def _describe_arithmetic(recipe: Transform, inputs: Sequence[Described]) -> Described:
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


def _describe_selected_rows(recipe: Transform, inputs: Sequence[Described]) -> Described:
    (shape, dtype), (indices, _) = inputs
    return (*indices, *shape[1:]), dtype


def _describe_dequantized_fp8(recipe: Transform, inputs: Sequence[Described]) -> Described:
    (shape, _), (scale_shape, _) = inputs
    _check_broadcast(scale_shape, shape)
    return shape, torch.float32


def _describe_dequantized_fp8_blocks(recipe: Transform, inputs: Sequence[Described]) -> Described:
    weight, scales = _metas(inputs)
    check_fp8_block_shapes(weight, scales)
    return tuple(weight.shape), torch.float32


def _describe_dequantized_nvfp4(recipe: Transform, inputs: Sequence[Described]) -> Described:
    packed, block_scales, scales = _metas(inputs)
    *outer, rows, num_bytes = packed.shape
    check_nvfp4_shapes(2 * num_bytes, (*outer, rows), block_scales)
    num_groups = scales.shape[-1] if scales.ndim else 1
    if rows % num_groups:
        raise ValueError(f"scales {list(scales.shape)} of a weight of {rows} rows, which are no equal groups")
    _check_broadcast(scales.shape[:-1], outer)
    return (*outer, rows, 2 * num_bytes), torch.float32


def _check_broadcast(scale_shape: Sequence[int], shape: Sequence[int]) -> None:
    if torch.broadcast_shapes(scale_shape, shape) != tuple(shape):
        raise ValueError(f"scales {list(scale_shape)} do not fit {list(shape)}")


_RULES: dict[str, Callable[[Transform, Sequence[Described]], Described]] = {
    "add": _describe_arithmetic,
    "mul": _describe_arithmetic,
    "check_block_scales": _describe_same,
    "concat": _describe_concat,
    "stack": _describe_stack,
    "select_rows": _describe_selected_rows,
    "dequantize_fp8": _describe_dequantized_fp8,
    "dequantize_fp8_blocks": _describe_dequantized_fp8_blocks,
    "dequantize_nvfp4": _describe_dequantized_nvfp4,
}
"""Of transforms that would run meta kernels which import torch's compiler: that takes longer than loading a small
model, and 60 MB."""
