"""Launches of products with a weight in any format: the geometry of the kernels in ``plugins/linear``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qwen4exp_trt.plugins.kernels import (
    MAX_SHARED_BYTES,
    NUM_SEMAPHORES,
    Arg,
    Call,
    Kernel,
    Launch,
    ScratchRef,
    SemaphoreRef,
    TensorRef,
    c_type,
)
from qwen4exp_trt.plugins.linear_many_launch import can_take, partial_floats, tiled
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

__all__ = ["BF16", "FP8_BLOCKS", "MOST_FEW", "NVFP4", "Split", "Tokens", "Weight", "product_launches", "split_product"]

MOST_FEW = 8
"""Tokens up to which the kernel that keeps them in shared memory is used."""
MOST_TOKENS_OF_A_TILE = 64
"""Tokens up to which a block multiplies all of them; beyond, blocks divide tokens and rows among them."""


def product_launches(call: Call, x: Tokens, weight: Weight, out: TensorRef) -> Iterator[Launch]:
    """``out[T, N] = x @ weight.T``, by tensor cores where ``x`` is BF16 and K a multiple that suits the format."""
    form = weight.format
    if x.count > MOST_TOKENS_OF_A_TILE and can_take(x, weight):
        yield tiled(call, x, weight, out, _partial_sums(call, x, weight))
    elif x.dtype != torch.bfloat16 or weight.columns % form.multiple:
        yield _any_shape(x, weight, out)
    else:
        few = _few_tokens(call, x, weight, out) if x.count <= MOST_FEW else None
        yield few or _many_tokens(call, x, weight, out)


def _any_shape(x: Tokens, weight: Weight, out: TensorRef) -> Launch:
    warps, tokens = 4, 8
    return Launch(
        Kernel("linear/any_shape.cu", "any_shape", (*product_defines(weight, out), ("INPUT", c_type(x.dtype)))),
        grid=(ceil_div(weight.rows, warps), min(ceil_div(x.count, tokens), 65535), 1),
        threads=warps * WARP,
        args=(x.values, *weight.args, out, x.count, weight.rows, weight.columns),
    )


# --- few tokens -----------------------------------------------------------------------------------------------------

FEW_WARPS = 8
MOST_SLOTS = 6
"""Steps of a warp that are on their way at once: each 16 bytes of one or two rows for every lane."""
MOST_STAGED_BYTES = 56 * 1024
"""Of the tokens that a block keeps in shared memory."""
MOST_PARTS, MOST_ROWS_IN_PARTS = 16, 8192
COST_OF_PARTS, COST_OF_A_PART = 64 * 1024, 4 * 1024
"""Of K in parts: bytes that a multiprocessor reads while the last block of a tile waits for the others and adds up."""
COST_OF_HALVES = 1.15
"""Of tiles of 8 rows beside those of 16."""


@dataclass(frozen=True)
class Split:
    """How a product is shared.

    K is in ``parts`` for different blocks, each part for ``k_warps`` warps of a tile of 8 * ``halves`` rows. A warp
    takes ``segments`` times ``depth`` steps, of which ``depth`` are on their way at once.
    """

    parts: int
    segments: int
    depth: int
    k_warps: int = 4
    halves: int = 2

    @property
    def steps(self) -> int:
        """Of a part; some may lie beyond K."""
        return self.k_warps * self.segments * self.depth

    def shared_bytes(self, tokens: int, columns: int, form: WeightFormat) -> tuple[int, int]:
        """Dynamic and static shared memory."""
        slots = FEW_WARPS * self.depth * 512 * self.halves
        scales = 2 * FEW_WARPS // self.k_warps * form.tile_scale_bytes(8 * self.halves, self.steps * form.step)
        staged = _staged_bytes(min(self.steps, ceil_div(columns, form.step)), tokens, form)
        return slots + scales + staged, 2 * 4 * FEW_WARPS * tokens * (8 * self.halves + 4) + 1024


def split_product(tokens: int, rows: int, columns: int, form: WeightFormat, num_sms: int) -> Split | None:
    """The split in which the busiest multiprocessor has the least to do, or None; ``tokens`` are 1, 2, 4 or 8."""

    def cost(split: Split) -> float:
        busiest = ceil_div(split.parts * ceil_div(rows, 8 * split.halves), num_sms)
        num_bytes = busiest * 8 * split.halves * columns / split.parts * form.step_bytes / form.step
        in_parts = COST_OF_PARTS + split.parts * COST_OF_A_PART if split.parts > 1 else 0
        waits = 1 + 0.5 / split.depth
        return num_bytes * waits * (COST_OF_HALVES if split.halves == 1 else 1) + in_parts

    def deepest(parts: int, k_warps: int, halves: int) -> Iterator[Split]:
        of_warp = ceil_div(ceil_div(columns, form.step), parts * k_warps)
        splits = [Split(parts, ceil_div(of_warp, depth), depth, k_warps, halves) for depth in range(1, MOST_SLOTS + 1)]
        splits = [split for split in splits if sum(split.shared_bytes(tokens, columns, form)) <= MAX_SHARED_BYTES]
        if splits:
            yield min(splits, key=lambda split: split.segments * (split.depth + 0.5))

    splits = [
        split
        for parts in _numbers_of_parts(tokens, rows, columns, form)
        for k_warps, halves in ((4, 2), (8, 1))
        for split in deepest(parts, k_warps, halves)
    ]
    return min(splits, key=cost, default=None)


def _numbers_of_parts(tokens: int, rows: int, columns: int, form: WeightFormat) -> range:
    """Into how many parts K may go: as many as keep the tokens small; one if there are tiles enough for everybody."""
    least = ceil_div(2 * tokens * columns, MOST_STAGED_BYTES)
    if rows > MOST_ROWS_IN_PARTS:
        return range(1, 2 if least == 1 else 1)
    return range(least, max(least, min(MOST_PARTS, ceil_div(columns, 4 * form.step))) + 1)


def _few_tokens(call: Call, x: Tokens, weight: Weight, out: TensorRef) -> Launch | None:
    form, tokens = weight.format, _power_of_two(x.count)
    split = split_product(tokens, weight.rows, weight.columns, form, call.num_sms)
    if split is None:
        return None
    blocks_per_sm = 3 if split.halves == 1 and tokens == 1 and form == NVFP4 else 2
    sizes = {
        "TOKENS": tokens,
        "SEGMENTS": split.segments,
        "DEPTH": split.depth,
        "K_WARPS": split.k_warps,
        "TILE_HALVES": split.halves,
        "IS_WHOLE": int(split.parts * split.steps == ceil_div(weight.columns, form.step)),
        "BLOCKS_PER_SM": blocks_per_sm,
    }
    blocks = ceil_div(weight.rows, 8 * split.halves * FEW_WARPS // split.k_warps)
    return Launch(
        Kernel("linear/few_tokens.cu", "few_tokens", product_defines(weight, out, **sizes)),
        grid=(min(blocks, max(blocks_per_sm * call.num_sms // split.parts, 1)), split.parts, 1),
        threads=FEW_WARPS * WARP,
        args=_product_args(call, x, weight, out),
        shared_bytes=split.shared_bytes(tokens, weight.columns, form)[0],
    )


def _product_args(call: Call, x: Tokens, weight: Weight, out: TensorRef) -> tuple[Arg, ...]:
    """The arguments that the kernels of few and of many tokens share, in their order."""
    sizes = x.count, weight.rows, weight.columns
    return x.values, *weight.args, out, _partial_sums(call, x, weight), SemaphoreRef(), *sizes


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


# --- many tokens ----------------------------------------------------------------------------------------------------

MANY_WARPS, MANY_ROW_TILES, MANY_DEPTH = 8, 2, 3


@dataclass(frozen=True)
class Tile:
    """What a block multiplies at once: ``tokens`` by the rows of ``row_warps`` warps."""

    tokens: int
    row_warps: int
    blocks_per_sm: int

    @property
    def rows(self) -> int:
        return 16 * MANY_ROW_TILES * self.row_warps

    @property
    def k_warps(self) -> int:
        return MANY_WARPS // self.row_warps


TILES = (Tile(16, 2, 2), Tile(32, 4, 1), Tile(64, 4, 1))


def _tile(tokens: int, form: WeightFormat) -> Tile:
    fitting = [tile for tile in TILES if tile.tokens <= form.most_tokens]
    return next((tile for tile in fitting if tile.tokens >= tokens), fitting[-1])


def _many_tokens(call: Call, x: Tokens, weight: Weight, out: TensorRef) -> Launch:
    form = weight.format
    tile = _tile(x.count, form)
    tiles, blocks = ceil_div(x.count, tile.tokens), ceil_div(weight.rows, tile.rows)
    stages = ceil_div(weight.columns, tile.k_warps * form.step)
    most_parts = tile.blocks_per_sm * call.num_sms // (tiles * blocks)
    part_stages = ceil_div(stages, max(1, min(most_parts, stages // MANY_DEPTH)))
    parts = ceil_div(stages, part_stages)
    assert parts == 1 or tiles * blocks <= NUM_SEMAPHORES
    sizes = {"TOKENS": tile.tokens, "ROW_WARPS": tile.row_warps, "BLOCKS_PER_SM": tile.blocks_per_sm}
    slots = MANY_WARPS * MANY_DEPTH * MANY_ROW_TILES * form.slot_bytes
    return Launch(
        Kernel("linear/many_tokens.cu", "many_tokens", product_defines(weight, out, **sizes)),
        grid=(tiles, blocks, parts),
        threads=MANY_WARPS * WARP,
        args=(*_product_args(call, x, weight, out), part_stages),
        shared_bytes=max(
            slots + _staged_bytes(tile.k_warps, tile.tokens, form), 4 * tile.k_warps * tile.tokens * (tile.rows + 4)
        ),
    )


def _staged_bytes(steps: int, tokens: int, form: WeightFormat) -> int:
    """Of so many steps of tokens in shared memory, padded against bank conflicts."""
    groups = form.step // 32
    return 16 * steps * groups * (4 * tokens + (8 // groups if groups > 1 and tokens > 1 else 0))


def _partial_sums(call: Call, x: Tokens, weight: Weight) -> ScratchRef:
    """Scratch for the sums of all parts of K, of a size that neither more tokens nor more multiprocessors reduce."""
    tokens = min(x.count, MOST_FEW)
    parts = _numbers_of_parts(_power_of_two(tokens), weight.rows, weight.columns, weight.format)
    floats = parts[-1] * tokens * weight.rows if len(parts) and parts[-1] > 1 else 0
    if x.count > MOST_FEW:
        tile = max((tile for tile in TILES), key=lambda tile: tile.blocks_per_sm * tile.tokens * tile.rows)
        floats = max(floats, call.num_sms * tile.blocks_per_sm * tile.tokens * tile.rows)
    if x.count > MOST_TOKENS_OF_A_TILE:
        floats = max(floats, partial_floats(call.num_sms))
    return call.scratch(floats)
