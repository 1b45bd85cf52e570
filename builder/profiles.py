"""The optimization profiles of an engine: shape ranges of every network input with dynamic dims."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.specs import NUM_BLOCKS, NUM_SLOTS, StateSpec, TensorSpec

_MAX_NUM_BLOCKS = 2**20
_MAX_NUM_SLOTS = 2**16
"""Pools are sized when an engine is loaded, by free memory: these bounds only have to be out of the way."""

Shape = tuple[int, ...]


class Extent(NamedTuple):
    """The smallest, the typical and the largest size of a dynamic dim."""

    min: int
    opt: int
    max: int


class ShapeRange(NamedTuple):
    """The smallest, the typical and the largest shape of a tensor."""

    min: Shape
    opt: Shape
    max: Shape


Profile = dict[str, ShapeRange]
"""Tensor name -> its shapes."""


def profile_dims(limits: EngineLimits) -> dict[str, dict[str, Extent]]:
    """The extents of the named dims in each profile, by profile name in engine order."""
    batch, blocks = limits.max_batch_size, limits.blocks_per_seq
    shared = {
        "B": Extent(1, batch, batch),
        "B_plus_1": Extent(2, batch + 1, batch + 1),
        "L": Extent(1, batch, limits.max_logits_rows),
        "max_blocks": Extent(1, blocks, blocks),
        NUM_BLOCKS: Extent(1, min(limits.max_num_blocks, _MAX_NUM_BLOCKS), _MAX_NUM_BLOCKS),
        NUM_SLOTS: Extent(1, min(limits.num_slots, _MAX_NUM_SLOTS), _MAX_NUM_SLOTS),
    }
    return {
        "decode": {"T": Extent(1, batch, limits.max_decode_tokens), **shared},
        "prefill": {"T": Extent(1, limits.max_step_tokens, limits.max_step_tokens), **shared},
    }


def optimization_profiles(limits: EngineLimits, specs: Iterable[TensorSpec | StateSpec]) -> dict[str, Profile]:
    """The profiles by name, in engine order, for the inputs and states in ``specs``. Static tensors need no range."""
    dynamic = [spec for spec in specs if any(isinstance(dim, str) for dim in spec.shape)]
    return {
        name: {spec.name: _shape_range(spec, dims) for spec in dynamic} for name, dims in profile_dims(limits).items()
    }


def _shape_range(spec: TensorSpec | StateSpec, dims: Mapping[str, Extent]) -> ShapeRange:
    unknown = [dim for dim in spec.shape if isinstance(dim, str) and dim not in dims]
    if unknown:
        raise BuildError(
            f"{spec.name} has the dynamic dims {', '.join(unknown)}, which have no range; add them to profile_dims"
        )
    extents = [dims[dim] if isinstance(dim, str) else Extent(dim, dim, dim) for dim in spec.shape]
    return ShapeRange(*(tuple(sizes) for sizes in zip(*extents, strict=True)))
