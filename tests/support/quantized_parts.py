"""Quantizes weights into the parts of each format, and computes by plain arithmetic what parts mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from quantized_checkpoints import FP8_BLOCK, Stored, nvfp4_value, store_fp8, store_fp8_blocks, store_nvfp4
from torch import Tensor

from qwen4exp_trt.passes.verification import random_source
from qwen4exp_trt.runtime.specs import WeightSpec
from qwen4exp_trt.runtime.weight_formats import PACKED_FP4, Part, WeightFormat, part_name
from qwen4exp_trt.runtime.weights import dtype_from_name


def value_of_parts(format: WeightFormat, parts: Mapping[Part, Tensor]) -> Tensor:
    """The float32 weight: element times scale, written without anything of the package."""
    codes, scales = parts[Part.CODES], parts[Part.SCALES]
    if format is WeightFormat.FP8_BLOCKS:
        groups = scales.shape[1] if scales.ndim == codes.ndim + 1 else 1
        values = codes.float().unflatten(-2, (groups, -1))
        grid = scales.reshape(*values.shape[:-2], *scales.shape[-2:])
        by_row = grid.repeat_interleave(FP8_BLOCK, -2)[..., : values.shape[-2], :]
        return (values * by_row.repeat_interleave(FP8_BLOCK, -1)[..., : values.shape[-1]]).flatten(-3, -2)
    if format is WeightFormat.FP8:
        return codes.float() * scales.repeat_interleave(len(codes) // len(scales)).unsqueeze(-1)
    return nvfp4_value(codes.view(torch.uint8), parts[Part.BLOCK_SCALES], scales)


_STORES: dict[WeightFormat, Callable[[Tensor], Stored]] = {
    WeightFormat.FP8: store_fp8,
    WeightFormat.FP8_BLOCKS: lambda weight: store_fp8_blocks(weight, torch.float32),
    WeightFormat.NVFP4: store_nvfp4,
}


def quantize_parts(format: WeightFormat, weight: Tensor, groups: int) -> dict[Part, Tensor]:
    """The parts of a matrix, of experts of ``groups`` matrices each, or of a table with so many scales."""
    stored = [_STORES[format](matrix).parts for matrix in weight.unflatten(-2, (groups, -1)).flatten(0, -3)]

    def join(suffix: str) -> Tensor:
        return torch.cat([parts[suffix] for parts in stored]).reshape(*weight.shape[:-1], -1)

    scale_shape = (*weight.shape[:-2], groups)
    codes = join("weight")
    if format is WeightFormat.NVFP4:
        scales = torch.stack([parts["weight_scale_2"] for parts in stored]).reshape(scale_shape)
        codes = codes.view(dtype_from_name(PACKED_FP4))
        return {Part.CODES: codes, Part.BLOCK_SCALES: join("weight_scale"), Part.SCALES: scales}
    if format is WeightFormat.FP8:
        return {Part.CODES: codes, Part.SCALES: torch.stack([p["weight_scale"] for p in stored]).float().reshape(-1)}
    grids = torch.stack([parts["weight_scale_inv"] for parts in stored])
    leading = [*weight.shape[:-2], *([groups] if groups > 1 else [])]
    return {Part.CODES: codes, Part.SCALES: grids.reshape(*leading, *grids.shape[1:])}


def quantized_source(
    weights: Sequence[WeightSpec], formats: Mapping[str, WeightFormat], groups: Mapping[str, int] | None = None
) -> Callable[[str], Tensor]:
    """Random weights; those in ``formats`` also in parts, and under their own names what the parts mean.

    ``groups``: as in `quantize_parts`, by weight; 2 for gate and up of experts and 1 for others unless given.
    """
    random, tensors = random_source(weights), dict[str, Tensor]()
    for name, format in formats.items():
        default = 2 if name.endswith("gate_up_proj") else 1
        parts = quantize_parts(format, random(name), (groups or {}).get(name, default))
        tensors |= {part_name(name, part): tensor for part, tensor in parts.items()}
        tensors[name] = value_of_parts(format, parts)
    return lambda name: tensors[name] if name in tensors else random(name)
