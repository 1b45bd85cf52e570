"""How a checkpoint provides a weight: as one float tensor, or as the tensors of a quantized format."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from qwen4exp_trt.plugins.number_formats import FP8_BLOCK
from qwen4exp_trt.runtime.specs import Literal, WeightRecipe
from qwen4exp_trt.runtime.weight_formats import Part, WeightFormat
from qwen4exp_trt.runtime.weights import transform

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredWeight:
    """The recipes of a weight over tensors of a checkpoint."""

    shape: Shape
    value: WeightRecipe
    """The float weight, dequantized if the checkpoint quantized it."""
    format: WeightFormat = WeightFormat.FLOAT
    """FLOAT as well for a weight in several tensors whose formats differ; ``formats`` has them."""
    parts: Mapping[Part, WeightRecipe] = field(default_factory=dict[Part, WeightRecipe])
    """What `runtime.weight_formats.Part` describes; none of a FLOAT weight."""
    num_scales: int = 1
    """Of an n-gram table: its S equal groups of rows have a scale each."""
    formats: tuple[WeightFormat, ...] = ()
    """All that the checkpoint uses for it, if there are several."""

    @property
    def stored_formats(self) -> tuple[WeightFormat, ...]:
        return self.formats or (self.format,)


def stack_experts(experts: Sequence[Sequence[StoredWeight]]) -> StoredWeight:
    """``[E, G*N, K]`` from the G matrices ``[N, K]`` of each of E experts; it keeps a format that all of them have."""
    formats = _formats([matrix for matrices in experts for matrix in matrices])
    rows, columns = experts[0][0].shape
    shape = (len(experts), len(experts[0]) * rows, columns)
    value = transform("stack", *(_concat_rows([matrix.value for matrix in matrices]) for matrices in experts))
    if len(formats) > 1 or formats == (WeightFormat.FLOAT,):
        return StoredWeight(shape, value, formats=formats)
    if formats == (WeightFormat.FP8,):
        experts = [[_with_grid(matrix) for matrix in matrices] for matrices in experts]
    codes = [_concat_rows([matrix.parts[Part.CODES] for matrix in matrices]) for matrices in experts]
    parts: dict[Part, WeightRecipe] = {Part.CODES: transform("stack", *codes)}
    scales = [[matrix.parts[Part.SCALES] for matrix in matrices] for matrices in experts]
    if formats == (WeightFormat.NVFP4,):
        blocks = [_concat_rows([matrix.parts[Part.BLOCK_SCALES] for matrix in matrices]) for matrices in experts]
        parts[Part.BLOCK_SCALES] = transform("stack", *blocks)
        parts[Part.SCALES] = transform("stack", *map(_concat_rows, scales))
        return StoredWeight(shape, value, WeightFormat.NVFP4, parts)
    grids = [matrices[0] if len(matrices) == 1 else transform("stack", *matrices) for matrices in scales]
    parts[Part.SCALES] = transform("stack", *grids)
    return StoredWeight(shape, value, WeightFormat.FP8_BLOCKS, parts)


def _with_grid(matrix: StoredWeight) -> StoredWeight:
    """An FP8 matrix with its one scale repeated for every block of 128 x 128."""
    rows, columns = matrix.shape
    grid = transform("expand", matrix.parts[Part.SCALES], shape=(-(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)))
    return StoredWeight(matrix.shape, matrix.value, WeightFormat.FP8_BLOCKS, {**matrix.parts, Part.SCALES: grid})


def concat_shards(shards: Sequence[StoredWeight]) -> StoredWeight:
    """A table ``[R, E]`` from consecutive rows; it keeps a format that all have, with a scale for each or for all."""
    shape = (sum(shard.shape[0] for shard in shards), *shards[0].shape[1:])
    value, formats = _concat_rows([shard.value for shard in shards]), _formats(shards)
    if formats not in ((WeightFormat.FP8,), (WeightFormat.NVFP4,)):
        return StoredWeight(shape, value, formats=formats)
    parts = {part: _concat_rows([shard.parts[part] for shard in shards]) for part in shards[0].parts}
    scales = [shard.parts[Part.SCALES] for shard in shards]
    if len(set(scales)) == 1:
        return StoredWeight(shape, value, formats[0], {**parts, Part.SCALES: scales[0]})
    # Shards of different sizes are groups of as many rows as divide all of them, some with equal scales.
    group = math.gcd(*(shard.shape[0] for shard in shards))
    repeated = [
        transform("expand", scale, shape=(shard.shape[0] // group,)) if shard.shape[0] > group else scale
        for scale, shard in zip(scales, shards, strict=True)
    ]
    return StoredWeight(shape, value, formats[0], {**parts, Part.SCALES: _concat_rows(repeated)}, shape[0] // group)


def select_rows(weight: StoredWeight, rows: Sequence[int]) -> StoredWeight:
    """Those ``rows`` of a matrix ``[N, K]``; a format with scales for blocks of several rows becomes float."""
    indices = Literal("int32", (len(rows),), tuple(rows))
    shape, value = (len(rows), *weight.shape[1:]), transform("select_rows", weight.value, indices)
    if weight.format not in (WeightFormat.NVFP4, WeightFormat.FP8):
        return StoredWeight(shape, value, formats=weight.stored_formats)
    by_row = (Part.CODES, Part.BLOCK_SCALES)
    parts = {
        part: transform("select_rows", recipe, indices) if part in by_row else recipe
        for part, recipe in weight.parts.items()
    }
    return StoredWeight(shape, value, weight.format, parts)


def _formats(weights: Sequence[StoredWeight]) -> tuple[WeightFormat, ...]:
    return tuple(dict.fromkeys(weight.format for weight in weights))


def _concat_rows(parts: Sequence[WeightRecipe]) -> WeightRecipe:
    return parts[0] if len(parts) == 1 else transform("concat", *parts, dim=0)
