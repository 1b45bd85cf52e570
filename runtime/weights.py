"""Executes weight recipes: checkpoint tensors and cheap transforms in, program weights out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from qwen4exp_trt.errors import CheckpointError
from qwen4exp_trt.runtime.specs import Literal, Source, Transform, WeightRecipe, WeightSpec

TensorSource = Callable[[str], Tensor]
"""Gives a checkpoint tensor by name; a memory-mapped view is fine, nothing writes to it."""


def dtype_from_name(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype), name
    return dtype


def _concat(inputs: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat(list(inputs), dim)


TRANSFORMS: dict[str, Callable[..., Tensor]] = {
    "cast": lambda inputs, dtype: inputs[0].to(dtype_from_name(dtype)),
    "add": lambda inputs, value: inputs[0] + value,
    "concat": _concat,
    "stack": lambda inputs: torch.stack(list(inputs)),
    "reshape": lambda inputs, shape: inputs[0].reshape(shape),
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
    """Run ``recipe``. The result may be a view of the source's own memory when no transform changed it."""
    if isinstance(recipe, Source):
        return source(recipe.name)
    if isinstance(recipe, Literal):
        return torch.tensor(recipe.values, dtype=dtype_from_name(recipe.dtype)).reshape(recipe.shape)
    if recipe.op not in TRANSFORMS:
        raise CheckpointError(f"weight recipe uses the unknown transform {recipe.op!r}; known: {sorted(TRANSFORMS)}")
    return TRANSFORMS[recipe.op]([materialize(part, source) for part in recipe.inputs], **recipe.attr)


def materialize_weight(spec: WeightSpec, source: TensorSource) -> Tensor:
    """Run the recipe of ``spec`` and check that the result has the shape and dtype that the program expects."""
    tensor = materialize(spec.recipe, source)
    expected = (tuple(spec.tensor.shape), spec.tensor.dtype)
    found = (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
    if found != expected:
        raise CheckpointError(f"weight {spec.name}: its recipe gave {found}, the program expects {expected}")
    return tensor.contiguous()
