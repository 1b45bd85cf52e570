"""Pieces of weights that are read together and then computed, and the memory between reading and computing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen4exp_trt.runtime.recipe_pieces import Piece
from qwen4exp_trt.runtime.recipe_shapes import RecipeShapes
from qwen4exp_trt.runtime.specs import Source, SourceRows, Transform, WeightRecipe
from qwen4exp_trt.runtime.tensor_source import Read, TensorSource
from qwen4exp_trt.runtime.weights import apply_transform, literal_tensor

_BATCH_BYTES = 4 << 20
_BATCH_PIECES = 256
"""The most of a batch; a larger piece is a batch alone."""
_ALIGNMENT = 64
"""Where a tensor of any dtype may begin."""


class Staging:
    """Host memory for what is read and then computed.

    The same few buffers again and again, but for pieces larger than a batch: memory that goes back to the C library in
    another order than it came from there leaves holes, which would add up to several times what is in use.
    """

    def __init__(self, device: torch.device) -> None:
        # A GPU copies from pinned memory while the CPU goes on, and torch reuses it by itself once that has ended.
        self._is_pinned = device.type == "cuda"
        self._free: list[Tensor] = []

    def take(self, num_bytes: int) -> Tensor:
        if self._free and num_bytes <= _BATCH_BYTES:
            return self._free.pop()
        return torch.empty(max(num_bytes, _BATCH_BYTES), dtype=torch.uint8, pin_memory=self._is_pinned)

    def give_back(self, memory: Tensor) -> None:
        if not self._is_pinned and len(memory) == _BATCH_BYTES:
            self._free.append(memory)


@dataclass(frozen=True)
class _Leaf:
    """A source of a piece."""

    source: Source
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def staged_bytes(self) -> int:
        return -(-self.num_bytes // _ALIGNMENT) * _ALIGNMENT

    def read_into(self, out: Tensor) -> Read:
        rows = (self.source.start, self.source.stop) if isinstance(self.source, SourceRows) else None
        return Read(self.source.name, out, rows)

    def is_at_home_in(self, target: Tensor) -> bool:
        """Whether it can be read right where it belongs."""
        return target.device.type == "cpu" and target.is_contiguous() and target.dtype == self.dtype


class Batch:
    """Pieces that are read together. `start` it, then `finish` it."""

    def __init__(self) -> None:
        self._pieces: list[tuple[Piece, list[_Leaf]]] = []
        self._computed: list[tuple[Piece, list[Tensor]]] = []
        """Pieces that have to be computed, and what is read for them."""
        self._memory: Tensor | None = None
        self._wait: Callable[[], None] = lambda: None
        self.bytes_read = self.bytes_made = 0

    @property
    def num_pieces(self) -> int:
        return len(self._pieces)

    def add(self, piece: Piece, leaves: list[_Leaf]) -> None:
        self._pieces.append((piece, leaves))
        self.bytes_read += sum(leaf.staged_bytes for leaf in leaves)
        self.bytes_made += piece.num_bytes

    def start(self, source: TensorSource, staging: Staging) -> None:
        """Begin to read what the pieces need."""
        reads: list[Read] = []
        computed: list[tuple[Piece, list[_Leaf]]] = []
        for piece, leaves in self._pieces:
            if isinstance(piece.recipe, Source) and leaves[0].is_at_home_in(piece.target):
                reads.append(leaves[0].read_into(piece.target))
            else:
                computed.append((piece, leaves))
        if computed:
            self._memory = staging.take(sum(leaf.staged_bytes for _, leaves in computed for leaf in leaves))
            reads += self._stage(computed, self._memory)
        self._wait = source.start(reads)

    def _stage(self, computed: list[tuple[Piece, list[_Leaf]]], memory: Tensor) -> Iterator[Read]:
        """Give each source its part of ``memory``."""
        offset = 0
        for piece, leaves in computed:
            staged = []
            for leaf in leaves:
                part = memory[offset : offset + leaf.num_bytes].view(leaf.dtype).view(leaf.shape)
                offset += leaf.staged_bytes
                staged.append(part)
                yield leaf.read_into(part)
            self._computed.append((piece, staged))

    def finish(self, staging: Staging) -> None:
        """Wait for what is read, and fill the pieces' parts of the result."""
        self._wait()
        for piece, staged in self._computed:
            if isinstance(piece.recipe, Source) and staged[0].dtype == piece.target.dtype:
                _copy(piece.target, staged[0])  # straight to its place: no copy of it is made on a GPU
            else:
                _copy(piece.target, _evaluate(piece.recipe, iter(staged), piece.target.device))
        if self._memory is not None:
            staging.give_back(self._memory)


def batches_of(pieces: Iterable[Piece], shapes: RecipeShapes) -> Iterator[Batch]:
    """Batches that are large enough to be read in parallel."""
    batch = Batch()
    for piece in pieces:
        leaves = [_Leaf(source, *shapes(source)) for source in piece.sources()]
        num_bytes = sum(leaf.staged_bytes for leaf in leaves)
        is_full = batch.num_pieces == _BATCH_PIECES or batch.bytes_read + num_bytes > _BATCH_BYTES
        if batch.num_pieces and is_full:
            yield batch
            batch = Batch()
        batch.add(piece, leaves)
    yield batch


def _copy(target: Tensor, value: Tensor) -> None:
    """``value`` into ``target``, cast. Packed FP4 as bytes: what torch can do with it depends on the device."""
    if value.dtype == target.dtype == torch.float4_e2m1fn_x2:
        target, value = target.view(torch.uint8), value.view(torch.uint8)
    target.copy_(value, non_blocking=True)


def _evaluate(recipe: WeightRecipe, staged: Iterator[Tensor], device: torch.device) -> Tensor:
    """Run ``recipe`` on what was read for its sources, in their order."""
    if isinstance(recipe, Source):
        return next(staged).to(device, non_blocking=True)
    if isinstance(recipe, Transform):
        return apply_transform(recipe, [_evaluate(part, staged, device) for part in recipe.inputs])
    return literal_tensor(recipe).to(device)
