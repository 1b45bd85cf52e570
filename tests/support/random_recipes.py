"""Random weight recipes over tensors in memory, a plain evaluation, and the rows of tensors that rows of them need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from qwen4exp_trt.runtime.specs import Literal, Source, Transform, WeightRecipe
from qwen4exp_trt.runtime.tensor_source import FunctionSource, Read
from qwen4exp_trt.runtime.weights import TRANSFORMS, literal_tensor, transform

COLUMNS = (16, 32, 160)
MAX_ROWS = 300
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

NeededRows = Callable[[int, int], tuple[int, int] | None]
"""Rows ``start`` to ``stop`` of a recipe -> the rows of a tensor that they are made of; None for no rows."""


def evaluate(recipe: WeightRecipe, tensors: Mapping[str, Tensor]) -> Tensor:
    """The whole of ``recipe`` at once."""
    if isinstance(recipe, Source):
        return tensors[recipe.name]
    if isinstance(recipe, Literal):
        return literal_tensor(recipe)
    assert isinstance(recipe, Transform)
    return TRANSFORMS[recipe.op]([evaluate(part, tensors) for part in recipe.inputs], **recipe.attr)


def bits(tensor: Tensor) -> Tensor:
    """Its bytes in one dim: NaN equals itself, and torch has no equality for every dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1).view(torch.uint8)


class ReadRows(FunctionSource):
    """Tensors in memory; remembers which rows of each were read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors.__getitem__)
        self.rows: dict[str, set[int]] = {}
        self.tensors = tensors

    def start(self, reads: Sequence[Read]) -> Callable[[], None]:
        for read in reads:
            size = len(self.tensors[read.name]) if self.tensors[read.name].ndim else 1
            self.rows.setdefault(read.name, set()).update(range(*(read.rows or (0, size))))
        return super().start(reads)


class RandomRecipes:
    """Draws recipes of a given shape ``[rows, columns]``, and makes their tensors."""

    def __init__(self, draw: st.DrawFn) -> None:
        torch.manual_seed(0)
        self.draw = draw
        self.tensors: dict[str, Tensor] = {}
        self.needed: dict[str, NeededRows] = {}

    def matrix(self, rows: int, columns: int, at: int = 0, depth: int = 3) -> WeightRecipe:
        """A recipe whose first row is row ``at`` of the whole."""
        leaves = [self._float, self._view, self._expand, self._literal, self._fp8, self._fp8_blocks, self._nvfp4]
        nodes = [self._cast, self._add, self._concat_rows, self._concat_columns, self._reshape]
        make = self.draw(st.sampled_from(leaves + nodes * 2 if depth else leaves))
        return make(rows, columns, at, depth)

    def _source(self, tensor: Tensor, needed: NeededRows) -> Source:
        name = str(len(self.tensors))
        self.tensors[name], self.needed[name] = tensor, needed
        return Source(name)

    def _rows(self, tensor: Tensor, at: int, block: int = 1) -> Source:
        """A tensor of which each row belongs to ``block`` rows of the result, from row ``at`` on."""

        def needed(start: int, stop: int) -> tuple[int, int] | None:
            begin, end = max(start - at, 0), stop - at
            covered = (begin // block, min(-(-end // block), len(tensor)))
            return covered if begin < end and covered[0] < covered[1] else None

        return self._source(tensor, needed)

    def _scalar(self, value: float) -> Source:
        shape = self.draw(st.sampled_from([(), (1,)]))
        return self._source(torch.full(shape, value), lambda start, stop: (0, 1))

    def _float(self, rows: int, columns: int, at: int, depth: int) -> WeightRecipe:
        dtype = self.draw(st.sampled_from(list(_DTYPES.values())))
        return self._rows(torch.randn(rows, columns).to(dtype), at)

    def _view(self, rows: int, columns: int, at: int, depth: int) -> WeightRecipe:
        stored = torch.randn(rows, columns).bfloat16().view(torch.uint8)
        return transform("view", self._rows(stored, at), dtype="bfloat16")

    def _expand(self, rows: int, columns: int, at: int, depth: int) -> WeightRecipe:
        if self.draw(st.booleans()):
            return transform("expand", self._rows(torch.randn(rows, 1), at), shape=(-1, columns))
        shape = self.draw(st.sampled_from([(), (columns,), (1, columns)]))
        whole = self._source(torch.randn(shape), lambda start, stop: (0, MAX_ROWS))
        return transform("expand", whole, shape=(rows, columns))

    def _literal(self, rows: int, columns: int, at: int, depth: int) -> WeightRecipe:
        return Literal("float32", (rows, columns), tuple(range(rows * columns)))

    def _fp8(self, rows: int, columns: int, at: int, depth: int) -> WeightRecipe:
        weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        return transform("dequantize_fp8", self._rows(weight, at), self._scalar(0.3))

    def _fp8_blocks(self, rows: int, columns: int, at: int, depth: int) -> WeightRecipe:
        weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        scales = self._rows(torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5, at, block=128)
        return transform("dequantize_fp8_blocks", self._rows(weight, at), scales)

    def _nvfp4(self, rows: int, columns: int, at: int, depth: int) -> WeightRecipe:
        packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
        blocks = self._rows((torch.rand(rows, columns // 16) * 4).to(torch.float8_e4m3fn), at)
        group = self.draw(st.sampled_from([size for size in range(1, rows + 1) if rows % size == 0]))
        scale = self._scalar(0.01) if group == rows else self._rows(torch.rand(rows // group), at, block=group)
        checked = transform("check_block_scales", blocks)
        return transform("dequantize_nvfp4", self._rows(packed, at), checked, scale)

    def _cast(self, rows: int, columns: int, at: int, depth: int) -> WeightRecipe:
        dtype = self.draw(st.sampled_from(list(_DTYPES)))
        return transform("cast", self.matrix(rows, columns, at, depth - 1), dtype=dtype)

    def _add(self, rows: int, columns: int, at: int, depth: int) -> WeightRecipe:
        op = self.draw(st.sampled_from(["add", "mul"]))
        return transform(op, self.matrix(rows, columns, at, depth - 1), value=1.5)

    def _concat_rows(self, rows: int, columns: int, at: int, depth: int) -> WeightRecipe:
        cuts = self.draw(st.lists(st.integers(0, rows), max_size=3))
        bounds = sorted({0, rows, *cuts})
        parts = [self.matrix(b - a, columns, at + a, depth - 1) for a, b in pairwise(bounds)]
        return transform("concat", *parts, dim=self.draw(st.sampled_from([0, -2])))

    def _concat_columns(self, rows: int, columns: int, at: int, depth: int) -> WeightRecipe:
        if columns < 32:
            return self.matrix(rows, columns, at, depth - 1)
        parts = [self.matrix(rows, width, at, depth - 1) for width in (16, columns - 16)]
        return transform("concat", *parts, dim=self.draw(st.sampled_from([1, -1])))

    def _reshape(self, rows: int, columns: int, at: int, depth: int) -> WeightRecipe:
        inner: Any = transform("reshape", self.matrix(rows, columns, at, depth - 1), shape=(rows, 2, -1))
        return transform("reshape", inner, shape=self.draw(st.sampled_from([(rows, -1), (-1, columns)])))


@st.composite
def random_matrices(draw: st.DrawFn) -> tuple[WeightRecipe, RandomRecipes]:
    """A recipe ``[rows, columns]``, with what it was made of."""
    recipes = RandomRecipes(draw)
    return recipes.matrix(draw(st.integers(1, MAX_ROWS)), draw(st.sampled_from(COLUMNS))), recipes
