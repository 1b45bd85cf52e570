"""Launches the thin projections: by tiles of tensor cores for few and for many tokens, else one output at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qwen4exp_trt.plugins.kernels import Arg, Call, Kernel, Launch, SemaphoreRef, c_type

TILE_ROWS, TILE_TOKENS, CHUNK = 16, 8, 32
FEW_TOKENS = 32
"""Up to here a weight in registers meets all tokens; beyond, tiles of both go through shared memory."""

FEW_WARPS = 10
_MANY_THREADS, _ROW_WARPS, _MAX_ROW_TILES = 384, 6, 7
"""Of the kernel for many tokens: warps that share the weight rows of a block, and each one's tiles of eight."""
_BLOCK_TOKENS = (64, 128)
_STAGES = 3
_MAX_SPLITS, _MIN_STEPS = 40, 8
_SPLIT_COST = 0.08
"""Of one more split, whose sums are written and read, for a block on each multiprocessor: in times of such a block."""
_ANY_WARPS = 8


@dataclass(frozen=True)
class Projection:
    """The operands and outputs of one product, and its sizes."""

    normed: Arg
    weight: Arg
    lowrank: Arg
    inject: Arg
    tokens: int
    rows: int
    width: int
    streams: int
    dtype: torch.dtype
    scales: Arg | None = None
    """Of each stream of a token, if `normed` is to be multiplied by them (many tokens only)."""

    @property
    def padded_rows(self) -> int:
        return -(-self.rows // TILE_ROWS) * TILE_ROWS


def launches(call: Call) -> Iterator[Launch]:
    normed, weight, streams = call["normed"], call["weight"], call.attrs["hc_count"]
    (tokens, width), rows = normed.shape, weight.shape[0]
    product = Projection(normed, weight, call["lowrank"], call["inject"], tokens, rows, width, streams, normed.dtype)
    yield from project(call, product)


def product_fits(hidden: int, dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and hidden % CHUNK == 0


def project(call: Call, product: Projection) -> Iterator[Launch]:
    """The launches of ``product``, whose tensors may be operands of any op."""
    if not product_fits(product.width // product.streams, product.dtype):
        yield _any_shape(product)
    elif product.tokens <= FEW_TOKENS:
        yield _few_tokens(call, product)
    else:
        yield from _many_tokens(call, product)


def _few_tokens(call: Call, p: Projection) -> Launch:
    tiles = next(count for count in (1, 2, 4) if count * TILE_TOKENS >= p.tokens)
    defines = (("HIDDEN", p.width // p.streams), ("STREAMS", p.streams), ("ROWS", p.rows), ("TILES", tiles))
    partial = call.scratch(p.streams, p.tokens, p.padded_rows)
    return Launch(
        Kernel("hc_project/few_tokens.cu", "hc_project_few_tokens", defines),
        grid=(p.padded_rows // TILE_ROWS, p.streams, 1),
        threads=FEW_WARPS * 32,
        args=(p.normed, p.weight, p.lowrank, p.inject, partial, SemaphoreRef(), p.tokens),
        shared_bytes=tiles * FEW_WARPS * TILE_ROWS * TILE_TOKENS * 4,
    )


def _many_tokens(call: Call, p: Projection) -> Iterator[Launch]:
    block_tokens = next(count for count in _BLOCK_TOKENS if count >= p.tokens or count == _BLOCK_TOKENS[-1])
    row_tiles, token_blocks = -(-p.rows // 8), -(-p.tokens // block_tokens)
    groups = -(-row_tiles // (_ROW_WARPS * _MAX_ROW_TILES))
    tiles = -(-row_tiles // (_ROW_WARPS * groups))
    most = max(min(_MAX_SPLITS, p.width // CHUNK // _MIN_STEPS, 2 * call.num_sms // token_blocks), 1)
    splits = min(range(1, most + 1), key=lambda count: _time(call, groups * token_blocks, count))
    # As much as any smaller step takes, which has more splits of fewer tokens.
    sums = min(_MAX_SPLITS * p.tokens, 2 * call.num_sms * _BLOCK_TOKENS[-1])
    partial = call.scratch(max(sums, p.tokens * p.streams), p.padded_rows)
    defines = (("ROWS", p.rows), ("WIDTH", p.width), ("STREAMS", p.streams))
    defines += (("TOKEN_TILES", block_tokens // 32), ("ROW_TILES", tiles), ("STAGES", _STAGES))
    source, entry = "hc_project/many_tokens.cu", "hc_project_many_tokens"
    operands = (p.normed, p.weight)
    if p.scales is not None:
        entry, operands = "hc_project_many_scaled_tokens", (*operands, p.scales)
    yield Launch(
        Kernel(source, entry, defines),
        grid=(token_blocks, groups, splits),
        threads=_MANY_THREADS,
        args=(*operands, partial, p.tokens),
        shared_bytes=_STAGES * (block_tokens + _ROW_WARPS * tiles * 8) * CHUNK * 2,
    )
    yield Launch(
        Kernel(source, "hc_project_add_splits", defines),
        grid=(-(-p.tokens * p.padded_rows // 4 // _MANY_THREADS), 1, 1),
        threads=_MANY_THREADS,
        args=(partial, p.lowrank, p.inject, p.tokens, splits),
    )


def _time(call: Call, blocks: int, splits: int) -> float:
    """Of ``blocks`` that each are ``splits`` ones with a share of the columns, a multiprocessor for each."""
    return -(-blocks * splits // call.num_sms) / splits + _SPLIT_COST * splits * blocks / call.num_sms


def _any_shape(p: Projection) -> Launch:
    defines = (("ROWS", p.rows), ("WIDTH", p.width), ("STREAMS", p.streams), ("ACTIVATION", c_type(p.dtype)))
    return Launch(
        Kernel("hc_project/any_shape.cu", "hc_project_any_shape", defines),
        grid=(p.tokens, -(-p.rows // _ANY_WARPS), 1),
        threads=_ANY_WARPS * 32,
        args=(p.normed, p.weight, p.lowrank, p.inject),
    )
