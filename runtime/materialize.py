"""Runs weight recipes: tensors of a checkpoint in, weights of a program out.

A result is allocated once and filled piece by piece. The next pieces are read while one is computed, in a window of
fixed size. So the memory beside the result is `_WINDOW_BYTES` and what one piece takes, about 64 MiB in all; or, for
a recipe that cannot be cut into pieces, its largest tensor and what its transform makes of it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from qwen4exp_trt.errors import BundleError, CheckpointError
from qwen4exp_trt.runtime.aligned_memory import aligned_empty
from qwen4exp_trt.runtime.host_memory import map_into_gpu
from qwen4exp_trt.runtime.piece_batch import Batch, Staging, batches_of
from qwen4exp_trt.runtime.progress_line import Progress
from qwen4exp_trt.runtime.recipe_pieces import pieces_of
from qwen4exp_trt.runtime.recipe_rows import rows_of
from qwen4exp_trt.runtime.recipe_shapes import RecipeShapes
from qwen4exp_trt.runtime.specs import WeightRecipe, WeightSpec
from qwen4exp_trt.runtime.tensor_source import Described, TensorFunction, TensorSource, as_source
from qwen4exp_trt.runtime.weights import name_from_dtype

_WINDOW_BYTES = 32 << 20
"""What is being read, or is read and not computed yet."""


def materialize(
    recipe: WeightRecipe, source: TensorSource | TensorFunction, device: torch.device | str = "cpu"
) -> Tensor:
    """Run ``recipe`` on the tensors of ``source``; the transforms run on ``device``, where the result is, contiguous.

    Raises `CheckpointError` for damaged data and what torch raises for tensors that do not fit the recipe.
    """
    shapes = RecipeShapes(opened := as_source(source))
    result = _allocate(shapes(recipe), device)
    _fill(result, recipe, opened, shapes)
    return result


def read_rows(
    recipe: WeightRecipe,
    source: TensorSource | TensorFunction,
    start: int,
    stop: int,
    device: torch.device | str = "cpu",
    shapes: RecipeShapes | None = None,
) -> Tensor:
    """Rows ``start`` to ``stop`` (first dim) of what ``recipe`` gives, as `materialize`, reading no others.

    ``shapes`` of the same source save time when they serve several calls: a stack of experts has thousands of parts.
    `CheckpointError` for a recipe with a transform that does not go row by row.
    """
    opened = as_source(source)
    shapes = shapes or RecipeShapes(opened)
    if start < stop:
        return materialize(rows_of(recipe, start, stop, shapes), opened, device)
    shape, dtype = shapes(recipe)
    return torch.empty((0, *shape[1:]), dtype=dtype, device=device)


def materialize_weight(
    spec: WeightSpec,
    source: TensorSource | TensorFunction,
    device: torch.device | str = "cpu",
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> Tensor:
    """Run the recipe of ``spec``; ``advance`` is told the bytes of the weight that each piece made.

    `CheckpointError` unless the recipe gives the shape and dtype that the program expects, before anything is read;
    `BundleError` if there is no memory for the weight.
    """
    shapes = RecipeShapes(opened := as_source(source))
    try:
        described = shapes(spec.recipe)
    except (CheckpointError, RuntimeError, TypeError, ValueError, LookupError, OverflowError) as error:
        raise CheckpointError(f"weight {spec.name}: its recipe does not fit the checkpoint: {error}") from error
    expected = (tuple(spec.tensor.shape), spec.tensor.dtype)
    found = (described[0], name_from_dtype(described[1]))
    if found != expected:
        raise CheckpointError(f"weight {spec.name}: its recipe gave {found}, the program expects {expected}")
    try:
        result = _allocate(described, device)
    except (RuntimeError, MemoryError) as error:
        size = described[1].itemsize * math.prod(described[0])
        raise BundleError(
            f"cannot allocate {size / 2**30:,.1f} GiB for the weight {spec.name} on {device}; free memory, or build "
            f"with --precision nvfp4 --ple nvfp4: {error}"
        ) from error
    _fill(result, spec.recipe, opened, shapes, advance)
    return result


def load_weights(
    specs: Sequence[WeightSpec],
    source: TensorSource,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    host_weights: Collection[str] = (),
) -> dict[str, Tensor]:
    """Every weight by name, with the errors of `materialize_weight`; ``host_weights`` for a GPU to read from the host's
    memory."""
    total = sum(spec.tensor.num_bytes({}) for spec in specs)
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None and num_bytes:
            progress(done, total)

    def load(spec: WeightSpec) -> Tensor:
        if spec.name not in host_weights:
            return materialize_weight(spec, source, device, advance)
        weight = materialize_weight(spec, source, "cpu", advance)
        return map_into_gpu(weight, spec.name) if torch.device(device).type == "cuda" else weight

    return {spec.name: load(spec) for spec in specs}


def _allocate(described: Described, device: torch.device | str) -> Tensor:
    return aligned_empty(*described, device)


def _fill(
    result: Tensor,
    recipe: WeightRecipe,
    source: TensorSource,
    shapes: RecipeShapes,
    advance: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Fill ``result`` with what ``recipe`` gives."""
    window: deque[Batch] = deque()
    staging = Staging(result.device)

    def finish_first() -> None:
        batch = window.popleft()
        batch.finish(staging)
        advance(batch.bytes_made)

    for batch in batches_of(pieces_of(recipe, result, shapes), shapes):
        while window and sum(other.bytes_read for other in window) + batch.bytes_read > _WINDOW_BYTES:
            finish_first()
        batch.start(source, staging)
        window.append(batch)
    while window:
        finish_first()
