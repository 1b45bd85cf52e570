"""Executes weight recipes: checkpoint tensors and cheap transforms in, program weights out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qwen4exp_trt.errors import BundleError, CheckpointError, PluginError
from qwen4exp_trt.plugins.number_formats import FP8_BLOCK, dequantize_fp8_blocks, dequantize_nvfp4
from qwen4exp_trt.runtime.specs import Literal, Source, Transform, WeightRecipe, WeightSpec

TensorSource = Callable[[str], Tensor]
"""Gives a checkpoint tensor by name; a memory-mapped view is fine, nothing writes to it."""


def dtype_from_name(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise BundleError(f"{name!r} is not the name of a dtype; build the bundle again")
    return dtype


_ROWS_AT_ONCE = 64 * FP8_BLOCK
"""Rows of a weight that are dequantized together: what dequantization needs beside its result is a few times that."""
_LAST_SCALE_BYTE = 0x7E
"""The largest E4M3 number; what follows is NaN and the negative numbers."""


def _dequantize_fp8(inputs: list[Tensor]) -> Tensor:
    weight, scale = inputs
    return weight.float().mul_(scale.float())


def _dequantize_fp8_blocks(inputs: list[Tensor]) -> Tensor:
    weight, scales = inputs
    result = torch.empty(weight.shape, dtype=torch.float32, device=weight.device)
    for start in _row_starts(result):
        rows = slice(start, start + _ROWS_AT_ONCE)
        blocks = slice(start // FP8_BLOCK, (start + _ROWS_AT_ONCE) // FP8_BLOCK)
        result[rows] = dequantize_fp8_blocks(weight[rows], scales[blocks])
    return result


def _dequantize_nvfp4(inputs: list[Tensor]) -> Tensor:
    packed, block_scales, global_scale = inputs
    result = torch.empty((len(packed), 2 * packed.shape[1]), dtype=torch.float32, device=packed.device)
    for start in _row_starts(result):
        rows = slice(start, start + _ROWS_AT_ONCE)
        if int(block_scales[rows].view(torch.uint8).amax()) > _LAST_SCALE_BYTE:
            raise ValueError("a block scale is NaN or negative; the checkpoint is damaged, download it again")
        result[rows] = dequantize_nvfp4(packed[rows], block_scales[rows], global_scale)
    return result


def _row_starts(result: Tensor) -> range:
    """Where each group of rows starts; a meta tensor has nothing to fill."""
    return range(0, 0 if result.is_meta else len(result), _ROWS_AT_ONCE)


def name_from_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


TRANSFORMS: dict[str, Callable[..., Tensor]] = {
    "cast": lambda inputs, dtype: inputs[0].to(dtype_from_name(dtype)),
    "add": lambda inputs, value: inputs[0] + value,
    "mul": lambda inputs, value: inputs[0] * value,
    "concat": lambda inputs, dim: torch.cat(inputs, dim),
    "stack": lambda inputs: torch.stack(inputs),
    "reshape": lambda inputs, shape: inputs[0].reshape(shape),
    "view": lambda inputs, dtype: inputs[0].view(dtype_from_name(dtype)),
    "expand": lambda inputs, shape: inputs[0].expand(shape),
    "dequantize_fp8": _dequantize_fp8,
    "dequantize_fp8_blocks": _dequantize_fp8_blocks,
    "dequantize_nvfp4": _dequantize_nvfp4,
}
"""Transform name -> function of (inputs, **attrs)."""


def transform(op: str, *inputs: WeightRecipe, **attrs: Any) -> Transform:
    """A `Transform` whose op is known."""
    assert op in TRANSFORMS, op
    return Transform(op, tuple(inputs), tuple(attrs.items()))


def sources_of(recipe: WeightRecipe) -> list[str]:
    """The checkpoint tensors that ``recipe`` reads, in order."""
    if isinstance(recipe, Source):
        return [recipe.name]
    if isinstance(recipe, Transform):
        return [name for part in recipe.inputs for name in sources_of(part)]
    return []


def map_sources(recipe: WeightRecipe, resolve: Callable[[str], WeightRecipe]) -> WeightRecipe:
    """``recipe`` with every source replaced by what ``resolve`` makes of its name."""
    if isinstance(recipe, Source):
        return resolve(recipe.name)
    if isinstance(recipe, Transform):
        return Transform(recipe.op, tuple(map_sources(part, resolve) for part in recipe.inputs), recipe.attrs)
    return recipe


def materialize(recipe: WeightRecipe, source: TensorSource) -> Tensor:
    """Run ``recipe``. The result may be a view of the source's own memory when no transform changed it.

    Joined tensors are copied one by one into a result that is allocated once, so that only one part, whatever their
    number, is in memory beside it.
    """
    join = _join_of(recipe)
    if join is None:
        return _evaluate(recipe, lambda leaf: _read(leaf, source))
    expected = _evaluate(recipe, lambda leaf: _read(leaf, source).to("meta"))
    result, start = torch.empty(expected.shape, dtype=expected.dtype), 0
    for part in join.inputs:
        start = _place(result, start, join, materialize(part, source))
    return result


def _join_of(recipe: WeightRecipe) -> Transform | None:
    """The ``concat`` or ``stack`` that ``recipe`` is, or casts."""
    inner = recipe.inputs[0] if isinstance(recipe, Transform) and recipe.op == "cast" else recipe
    return inner if isinstance(inner, Transform) and inner.op in ("concat", "stack") else None


def _place(result: Tensor, start: int, join: Transform, part: Tensor) -> int:
    """Copy a part of ``join`` to ``start``, cast to the dtype of ``result``; returns where the next one goes."""
    dim, part = (0, part[None]) if join.op == "stack" else (join.attr["dim"], part)
    extent = part.shape[dim]
    result.narrow(dim, start, extent).copy_(part)
    return start + extent


def _evaluate(recipe: WeightRecipe, read: Callable[[Source | Literal], Tensor]) -> Tensor:
    """Run ``recipe`` on what ``read`` gives; meta tensors give the shape and dtype of the result."""
    if not isinstance(recipe, Transform):
        return read(recipe)
    if recipe.op not in TRANSFORMS:
        raise CheckpointError(f"weight recipe uses the unknown transform {recipe.op!r}; known: {sorted(TRANSFORMS)}")
    inputs = [_evaluate(part, read) for part in recipe.inputs]
    try:
        return TRANSFORMS[recipe.op](inputs, **recipe.attr)
    except (ValueError, PluginError) as error:
        raise CheckpointError(f"{', '.join(sources_of(recipe))}: {error}") from error


def _read(leaf: Source | Literal, source: TensorSource) -> Tensor:
    if isinstance(leaf, Source):
        return source(leaf.name)
    return torch.tensor(leaf.values, dtype=dtype_from_name(leaf.dtype)).reshape(leaf.shape)


def materialize_weight(spec: WeightSpec, source: TensorSource) -> Tensor:
    """Run the recipe of ``spec``; `CheckpointError` unless it gives the shape and dtype that the program expects."""
    try:
        tensor = materialize(spec.recipe, source)
    except (RuntimeError, TypeError, ValueError, LookupError, OverflowError) as error:
        raise CheckpointError(f"weight {spec.name}: its recipe does not fit the checkpoint: {error}") from error
    expected = (tuple(spec.tensor.shape), spec.tensor.dtype)
    found = (tuple(tensor.shape), name_from_dtype(tensor.dtype))
    if found != expected:
        raise CheckpointError(f"weight {spec.name}: its recipe gave {found}, the program expects {expected}")
    return tensor.contiguous()
