"""The transforms of weight recipes. `materialize` runs recipes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from qwen4exp_trt.errors import BundleError, CheckpointError, PluginError
from qwen4exp_trt.plugins.number_formats import dequantize_fp8_blocks, dequantize_nvfp4
from qwen4exp_trt.runtime.specs import Literal, Source, Transform, WeightRecipe
from qwen4exp_trt.runtime.weight_formats import DEQUANTIZE, PACKED_FP4, Part, WeightFormat


def dtype_from_name(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise BundleError(f"{name!r} is not the name of a dtype; build the bundle again")
    return dtype


_LAST_SCALE_BYTE = 0x7E
"""The largest E4M3 number; what follows is NaN and the negative numbers."""


def _dequantize_fp8(inputs: list[Tensor]) -> Tensor:
    weight, scale = inputs
    return weight.float().mul_(scale.float())


def _dequantize_nvfp4(inputs: list[Tensor]) -> Tensor:
    """A weight ``[..., N, K]``; each of the scales ``[..., G]`` belongs to one of G equal groups of its N rows."""
    packed, block_scales, scales = inputs
    scales = torch.atleast_1d(scales)
    return dequantize_nvfp4(packed, block_scales, scales.repeat_interleave(packed.shape[-2] // scales.shape[-1], -1))


def _check_block_scales(inputs: list[Tensor]) -> Tensor:
    (scales,) = inputs
    if scales.numel() and int(scales.view(torch.uint8).amax()) > _LAST_SCALE_BYTE:
        raise ValueError("a block scale is NaN or negative; the checkpoint is damaged, download it again")
    return scales


def _select_rows(inputs: list[Tensor]) -> Tensor:
    """Those rows of a matrix whose indices the second input has."""
    matrix, indices = inputs
    if matrix.dtype == dtype_from_name(PACKED_FP4):  # which torch does not index
        return matrix.view(torch.uint8)[indices.long()].view(matrix.dtype)
    return matrix[indices.long()]


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
    "select_rows": _select_rows,
    "dequantize_fp8": _dequantize_fp8,
    "dequantize_fp8_blocks": lambda inputs: dequantize_fp8_blocks(*inputs),
    "dequantize_nvfp4": _dequantize_nvfp4,
    "check_block_scales": _check_block_scales,
}
"""Transform name -> function of (inputs, **attrs)."""


def transform(op: str, *inputs: WeightRecipe, **attrs: Any) -> Transform:
    """A `Transform` whose op is known."""
    assert op in TRANSFORMS, op
    return Transform(op, tuple(inputs), tuple(attrs.items()))


def dequantize(weight_format: WeightFormat, parts: Mapping[Part, WeightRecipe]) -> Transform:
    """The float32 weight of the ``parts`` of a quantized one."""
    return transform(DEQUANTIZE[weight_format], *(parts[part] for part in Part if part in parts))


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


def apply_transform(recipe: Transform, inputs: list[Tensor]) -> Tensor:
    """The op of ``recipe`` on its evaluated inputs. `CheckpointError` with their names for values that are damaged."""
    if recipe.op not in TRANSFORMS:
        raise CheckpointError(f"weight recipe uses the unknown transform {recipe.op!r}; known: {sorted(TRANSFORMS)}")
    try:
        return TRANSFORMS[recipe.op](inputs, **recipe.attr)
    except (ValueError, PluginError) as error:
        raise CheckpointError(f"{', '.join(sources_of(recipe))}: {error}") from error


def literal_tensor(literal: Literal) -> Tensor:
    return torch.tensor(literal.values, dtype=dtype_from_name(literal.dtype)).reshape(literal.shape)
