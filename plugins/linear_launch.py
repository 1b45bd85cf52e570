"""Launches products with a weight in any format: the kernels of ``plugins/linear`` and their geometry."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import NUM_SEMAPHORES, Arg, Call, Kernel, Launch, ScratchRef, SemaphoreRef, c_type
from qwen4exp_trt.plugins.kernels import TensorRef

WARP = 32
TILE_ROWS = 16


@dataclass(frozen=True)
class WeightFormat:
    """A struct of ``include/weight_formats.cuh``: its elements of K a step of a warp, and those of a lane's 16 bytes."""

    name: str
    step: int

    @property
    def lane_elements(self) -> int:
        return self.step // 4


NVFP4 = WeightFormat("Nvfp4", 128)
FP8_BLOCKS = WeightFormat("Fp8Blocks", 64)
BF16 = WeightFormat("Bf16", 32)


@dataclass(frozen=True)
class Weight:
    """The operands of a weight ``[N, K]``: ``values``, scales of blocks, and float32 scales of rows ``[N]``."""

    format: WeightFormat
    values: TensorRef
    block_scales: TensorRef | None = None
    row_scales: TensorRef | None = None

    @property
    def args(self) -> tuple[Arg, ...]:
        """The kernels' three pointers; those that the format does not read point at the values."""
        return self.values, self.block_scales or self.values, self.row_scales or self.values


@dataclass(frozen=True)
class Tokens:
    """The activations ``[T, K]`` of ``dtype``, an operand or scratch."""

    values: TensorRef | ScratchRef
    dtype: torch.dtype
    count: int


MOST_FEW = 8
"""Tokens up to which `few_tokens` is used."""


def product_launches(call: Call, x: Tokens, weight: Weight, out: TensorRef) -> Iterator[Launch]:
    """``out[T, N] = x @ weight.T``: by tensor cores if ``x`` is BF16 and rows of 16 bytes are whole, else element-wise."""
    if x.dtype != torch.bfloat16 or weight.values.shape[1] % weight.format.lane_elements:
        yield _any_shape(x, weight, out)
        return
    partial = call.scratch(_partial_floats(x.count, weight, call.num_sms))
    if x.count <= MOST_FEW:
        yield _few_tokens(call, x, weight, out, partial)
    else:
        yield from _many_tokens(call, x, weight, out, partial)


def _defines(weight: Weight, out: TensorRef, **sizes: int) -> tuple[tuple[str, int | str], ...]:
    types = {"FORMAT": weight.format.name, "OUTPUT": c_type(out.dtype), "SCALES_ROWS": int(weight.row_scales is not None)}
    return tuple({**types, **sizes}.items())


def _any_shape(x: Tokens, weight: Weight, out: TensorRef) -> Launch:
    warps, tokens, (rows, columns) = 4, 8, weight.values.shape
    return Launch(
        Kernel("linear/any_shape.cu", "any_shape", (*_defines(weight, out), ("INPUT", c_type(x.dtype)))),
        grid=(-(-rows // warps), min(-(-x.count // tokens), 65535), 1),
        threads=warps * WARP,
        args=(x.values, *weight.args, out, x.count, rows, columns),
    )


# --- few tokens -----------------------------------------------------------------------------------------------------

K_WARPS, ROW_TILES = 4, 2
BLOCKS_PER_SM = 2
MOST_STEPS = 5
"""Steps of a warp that are under way at once: 16 bytes of two rows each, in every lane."""
MOST_STAGED = 2560
"""Columns of tokens that a block keeps in shared memory: 44 KiB for 8 tokens."""
MOST_PARTS = 24
PARTS_COST = 0.9
"""What a product in parts of K is worth beside one in a piece: its last blocks wait for each other."""


@dataclass(frozen=True)
class Split:
    """How K is shared: ``parts`` for blocks, in each of which a warp has ``segments`` times ``steps`` steps."""

    parts: int
    segments: int
    steps: int


def split_columns(columns: int, rows: int, step: int, num_sms: int) -> Split:
    """The split with the least idle work: of steps beyond K, and of multiprocessors with a tile less than others."""
    total = -(-columns // step)
    tiles = -(-rows // TILE_ROWS)
    best, best_score = None, 0.0
    for parts in range(1, _most_parts(rows, total) + 1):
        per_warp = -(-total // (parts * K_WARPS))
        for steps in range(MOST_STEPS, 0, -1):
            segments = -(-per_warp // steps)
            if segments * steps * K_WARPS * step > MOST_STAGED and parts < _most_parts(rows, total):
                continue
            used = total / (parts * K_WARPS * segments * steps)
            loads = parts * tiles / num_sms
            score = used * loads / math.ceil(loads) * (PARTS_COST if parts > 1 else 1) * (0.9 + 0.02 * steps)
            if score > best_score:
                best, best_score = Split(parts, segments, steps), score
    assert best is not None
    return best
