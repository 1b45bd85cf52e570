"""Launches of products with a weight in any format: the geometry of the kernels in ``plugins/linear``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qwen4exp_trt.plugins.kernels import (
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

WARP = 32
MOST_FEW = 8
"""Tokens up to which the kernel that keeps them in shared memory is used."""


@dataclass(frozen=True)
class WeightFormat:
    """A struct of ``include/weight_formats.cuh``.

    A step of a warp is ``step`` elements of K, a fourth of them for a lane; a slot for it in shared memory is of
    ``slot_bytes``, and is filled where K is a multiple of ``few_multiple``. ``most_tokens`` fit the registers at once.
    """

    name: str
    step: int
    slot_bytes: int
    few_multiple: int
    most_tokens: int


NVFP4 = WeightFormat("Nvfp4", 128, slot_bytes=1024 + 128, few_multiple=128, most_tokens=64)
FP8_BLOCKS = WeightFormat("Fp8Blocks", 64, slot_bytes=1024 + 16, few_multiple=16, most_tokens=32)
BF16 = WeightFormat("Bf16", 32, slot_bytes=1024, few_multiple=8, most_tokens=64)


@dataclass(frozen=True)
class Weight:
    """A weight ``[N, K]``: its values, scales of blocks, and float32 scales of rows ``[N]``."""

    format: WeightFormat
    values: TensorRef
    block_scales: TensorRef | None = None
    row_scales: TensorRef | None = None

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def columns(self) -> int:
        return self.values.shape[1]

    @property
    def args(self) -> tuple[Arg, ...]:
        """The kernels' three pointers; a format does not read those that it has not, which point at the values."""
        return self.values, self.block_scales or self.values, self.row_scales or self.values


@dataclass(frozen=True)
class Tokens:
    """Activations ``[T, K]``, an operand or scratch; T is ``count``."""

    values: TensorRef | ScratchRef
    dtype: torch.dtype
    count: int


def product_launches(call: Call, x: Tokens, weight: Weight, out: TensorRef) -> Iterator[Launch]:
    """``out[T, N] = x @ weight.T``, by tensor cores where ``x`` is BF16 and a row is whole pieces of 16 bytes."""
    form = weight.format
    if x.dtype != torch.bfloat16 or weight.columns % (form.step // 4):
        yield _any_shape(x, weight, out)
    elif x.count <= MOST_FEW and weight.columns % form.few_multiple == 0:
        yield _few_tokens(call, x, weight, out)
    else:
        yield from _many_tokens(call, x, weight, out)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _defines(weight: Weight, out: TensorRef, **sizes: int) -> tuple[tuple[str, int | float | str], ...]:
    has_scales = int(weight.row_scales is not None)
    return (
        ("FORMAT", weight.format.name),
        ("OUTPUT", c_type(out.dtype)),
        ("SCALES_ROWS", has_scales),
        *sizes.items(),
    )


def _any_shape(x: Tokens, weight: Weight, out: TensorRef) -> Launch:
    warps, tokens = 4, 8
    return Launch(
        Kernel("linear/any_shape.cu", "any_shape", (*_defines(weight, out), ("INPUT", c_type(x.dtype)))),
        grid=(_ceil_div(weight.rows, warps), min(_ceil_div(x.count, tokens), 65535), 1),
        threads=warps * WARP,
        args=(x.values, *weight.args, out, x.count, weight.rows, weight.columns),
    )


# --- few tokens -----------------------------------------------------------------------------------------------------

FEW_WARPS = 8
BLOCKS_PER_SM, RESIDENT, START = 2, 2, 1
MOST_SLOTS = 6
"""Steps of a warp that are on their way at once: each 16 bytes of two rows for every lane."""
MOST_STAGED_COLUMNS = 2560
"""Of the tokens that a block keeps in shared memory: 44 KiB if there are 8."""
MOST_PARTS = 16
MOST_ROWS_IN_PARTS = 8192
"""Beyond, there is a tile for everybody."""
WORTH_OF_PARTS = 0.9
"""Of a product in parts of K beside one in a piece: the last block of a tile waits for the others, then adds up."""


@dataclass(frozen=True)
class Split:
    """How a product is shared.

    K is in ``parts`` for different blocks, each part for ``k_warps`` warps of a tile of 8 * ``halves`` rows. A warp takes
    ``segments`` times ``depth`` steps, of which ``depth`` are on their way at once.
    """

    parts: int
    segments: int
    depth: int
    k_warps: int = 4
    halves: int = 2

    @property
    def steps(self) -> int:
        """Steps of all warps and parts, some of which may lie beyond K."""
        return self.parts * self.k_warps * self.segments * self.depth


def split_product(rows: int, columns: int, step: int, num_sms: int) -> Split:
    """The split that leaves the least idle: steps beyond K, and multiprocessors with fewer tiles than others."""
    total = _ceil_div(columns, step)

    def worth(split: Split) -> float:
        tiles_of_sm = split.parts * _ceil_div(rows, 8 * split.halves) / num_sms
        in_parts = WORTH_OF_PARTS if split.parts > 1 else 1
        return total / split.steps * tiles_of_sm / math.ceil(tiles_of_sm) * in_parts * split.depth / (split.depth + 0.5)

    def splits() -> Iterator[Split]:
        least, most = _range_of_parts(rows, columns, step)
        for parts in range(least, most + 1):
            of_warp = _ceil_div(total, parts * 4)
            for depth in range(1, min(of_warp, MOST_SLOTS) + 1):
                yield Split(parts, _ceil_div(of_warp, depth), depth)

    return max(splits(), key=worth)


def _range_of_parts(rows: int, columns: int, step: int) -> tuple[int, int]:
    """The smallest and the largest number of parts of K."""
    least = _ceil_div(columns, MOST_STAGED_COLUMNS)
    most = min(MOST_PARTS, _ceil_div(columns, step * 4)) if rows <= MOST_ROWS_IN_PARTS else 1
    return least, max(least, most)


def _few_tokens(call: Call, x: Tokens, weight: Weight, out: TensorRef) -> Launch:
    form = weight.format
    split = split_product(weight.rows, weight.columns, form.step, call.num_sms)
    sizes = {
        "TOKENS": 1 << (x.count - 1).bit_length(),
        "SEGMENTS": split.segments,
        "DEPTH": split.depth,
        "K_WARPS": split.k_warps,
        "TILE_HALVES": split.halves,
        "BLOCKS_PER_SM": RESIDENT,
        "START": START,
    }
    groups = form.step // 32
    group_units = 4 * sizes["TOKENS"] + (8 // groups if groups > 1 else 0)
    blocks = _ceil_div(weight.rows, 8 * split.halves * FEW_WARPS // split.k_warps)
    return Launch(
        Kernel("linear/few_tokens.cu", "few_tokens", _defines(weight, out, **sizes)),
        grid=(min(blocks, max(BLOCKS_PER_SM * call.num_sms // split.parts, 1)), split.parts, 1),
        threads=FEW_WARPS * WARP,
        args=(
            x.values,
            *weight.args,
            out,
            _partial_sums(call, x, weight),
            SemaphoreRef(),
            x.count,
            weight.rows,
            weight.columns,
        ),
        shared_bytes=FEW_WARPS * split.depth * form.slot_bytes + 16 * split.steps // split.parts * groups * group_units,
    )


# --- many tokens ----------------------------------------------------------------------------------------------------

BLOCK_ROWS, BLOCK_THREADS, BLOCK_K_WARPS, STAGES = 128, 256, 2, 3


def _many_tokens(call: Call, x: Tokens, weight: Weight, out: TensorRef) -> Iterator[Launch]:
    form = weight.format
    tokens = min(form.most_tokens, max(16, 1 << (x.count - 1).bit_length()))
    tiles, steps = _ceil_div(x.count, tokens), _ceil_div(weight.columns, form.step)
    arranged = call.scratch(tiles * tokens, steps * form.step, dtype=torch.bfloat16)
    units = tiles * tokens * steps * 4
    yield Launch(
        Kernel("linear/arrange_tokens.cu", "arrange_tokens", (("FORMAT", form.name), ("TOKENS", tokens))),
        grid=(min(_ceil_div(units, 256), 8 * call.num_sms), 1, 1),
        threads=256,
        args=(x.values, arranged, x.count, weight.columns, units),
    )
    row_blocks, stages = _ceil_div(weight.rows, BLOCK_ROWS), _ceil_div(steps, BLOCK_K_WARPS)
    part_stages = -(-stages // max(1, min(call.num_sms // (tiles * row_blocks), stages // 2)))
    parts = _ceil_div(stages, part_stages)
    assert parts == 1 or tiles * row_blocks <= NUM_SEMAPHORES
    yield Launch(
        Kernel("linear/many_tokens.cu", "many_tokens", _defines(weight, out, TOKENS=tokens)),
        grid=(tiles, row_blocks, parts),
        threads=BLOCK_THREADS,
        args=(
            arranged,
            *weight.args,
            out,
            _partial_sums(call, x, weight),
            SemaphoreRef(),
            x.count,
            weight.rows,
            weight.columns,
            part_stages,
        ),
        shared_bytes=tokens
        * max(
            2 * STAGES * BLOCK_K_WARPS * form.step,
            4 * BLOCK_K_WARPS * (BLOCK_ROWS + 4),
        ),
    )


def _partial_sums(call: Call, x: Tokens, weight: Weight) -> ScratchRef:
    """Scratch for the sums of all parts of K, of a size that neither more tokens nor more multiprocessors reduce."""
    form = weight.format
    _, parts = _range_of_parts(weight.rows, weight.columns, form.step)
    floats = parts * min(x.count, MOST_FEW) * weight.rows if parts > 1 else 0
    if x.count > MOST_FEW and call.num_sms >= 2 * _ceil_div(weight.rows, BLOCK_ROWS):
        floats = max(floats, call.num_sms * form.most_tokens * BLOCK_ROWS)
    return call.scratch(floats)
