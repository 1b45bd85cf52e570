"""Launches of products of many tokens: tiles of tokens by rows, ``plugins/linear/gemm.cu``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qwen4exp_trt.plugins.kernels import Call, Kernel, Launch, ScratchRef, SemaphoreRef, TensorRef
from qwen4exp_trt.plugins.linear_operands import (
    BF16,
    FP8_BLOCKS,
    NVFP4,
    WARP,
    Tokens,
    Weight,
    WeightFormat,
    ceil_div,
    product_defines,
)

LEAST_COLUMNS, COLUMNS_TO_ADD = 256, 140
"""Of a part of K; and those that could be multiplied in the time in which a part's sums are written, or read."""
MOST_SPLIT_TILES = 2
"""Parts of tiles for each multiprocessor, which bounds the workspace."""


@dataclass(frozen=True)
class GemmShape:
    """A tile as ``include/gemm.cuh`` divides it among the warps of a block."""

    row_warps: int
    token_warps: int
    warp_rows: int
    warp_tokens: int

    @property
    def rows(self) -> int:
        return self.row_warps * self.warp_rows

    @property
    def tokens(self) -> int:
        return self.token_warps * self.warp_tokens

    @property
    def threads(self) -> int:
        return WARP * self.row_warps * self.token_warps

    @property
    def macro(self) -> str:
        """The template arguments."""
        return f"{self.row_warps},{self.token_warps},{self.warp_rows},{self.warp_tokens}"

    def shared_bytes(self, form: WeightFormat) -> int:
        """Three buffers for 64 columns of the tokens, and those for stages of the rows."""
        stage = _STAGES[form]
        return 3 * 2 * 64 * self.tokens + (2 if stage.columns == 128 else 3) * stage.row_bytes * self.rows


@dataclass(frozen=True)
class _Stage:
    """What a block has of K at once, and its bytes of a row."""

    columns: int
    row_bytes: int


_STAGES = {NVFP4: _Stage(128, 64 + 8), FP8_BLOCKS: _Stage(64, 64), BF16: _Stage(64, 128)}
SHAPES = {NVFP4: GemmShape(8, 1, 32, 128), FP8_BLOCKS: GemmShape(4, 2, 32, 64), BF16: GemmShape(4, 2, 32, 64)}


@dataclass(frozen=True)
class Tiling:
    """The first ``whole`` tiles are multiplied whole, each of the others in ``parts`` parts of K."""

    tiles: int
    whole: int
    parts: int

    @property
    def works(self) -> int:
        return self.whole + (self.tiles - self.whole) * self.parts


def tile_product(tokens: int, rows: int, columns: int, shape: GemmShape, num_sms: int) -> Tiling:
    """Divides the tiles of the last round, in which not all multiprocessors would have one, so that it ends soonest."""
    tiles = ceil_div(tokens, shape.tokens) * ceil_div(rows, shape.rows)
    rest = tiles % num_sms

    def cost(parts: int) -> float:
        rounds = ceil_div(rest * parts, num_sms)
        adding = COLUMNS_TO_ADD * (rounds + parts) if parts > 1 else 0
        return rounds * columns / parts + adding

    most = max(min(MOST_SPLIT_TILES * num_sms // max(rest, 1), columns // LEAST_COLUMNS), 1)
    parts = min(range(1, most + 1), key=cost) if rest else 1
    return Tiling(tiles, tiles if parts == 1 else tiles - rest, parts)


def can_take(x: Tokens, weight: Weight) -> bool:
    """Whether rows of both operands lie at multiples of 16 bytes."""
    return x.dtype == torch.bfloat16 and weight.columns % weight.format.multiple == 0


def partial_floats(num_sms: int) -> int:
    """Of the sums of parts of K."""
    return MOST_SPLIT_TILES * num_sms * max(shape.tokens * shape.rows for shape in SHAPES.values())


def tiled(call: Call, x: Tokens, weight: Weight, out: TensorRef, partial_sums: ScratchRef) -> Launch:
    """``out[T, N] = x @ weight.T`` where `can_take`; ``partial_sums`` has `partial_floats`."""
    form, shape = weight.format, SHAPES[weight.format]
    tiling = tile_product(x.count, weight.rows, weight.columns, shape, call.num_sms)
    format_name = "Gemm" + form.name
    has_tail = int(weight.columns % _STAGES[form].columns != 0)
    defines = (
        ("FORMAT", format_name),
        *product_defines(weight, out)[1:],
        ("SHAPE", shape.macro),
        ("K_HAS_TAIL", has_tail),
    )
    sizes = x.count, weight.rows, weight.columns, tiling.whole, tiling.parts
    return Launch(
        Kernel("linear/gemm.cu", "gemm", defines),
        grid=(min(tiling.works, call.num_sms), 1, 1),
        threads=shape.threads,
        args=(x.values, *weight.args, out, partial_sums, SemaphoreRef(), *sizes),
        shared_bytes=shape.shared_bytes(form),
    )
