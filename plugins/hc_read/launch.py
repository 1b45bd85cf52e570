"""Launches a hyper-connection read: two kernels for few tokens, four for many, else those of its parts."""

from __future__ import annotations

from collections.abc import Iterator

from qwen4exp_trt.plugins.hc_gate_mix.launch import WARPS as MIX_WARPS
from qwen4exp_trt.plugins.hc_gate_mix.launch import (
    GatedMix,
    column_blocks,
    gate_mix,
    lowrank_bytes,
    many_fits,
    mix_fits,
)
from qwen4exp_trt.plugins.hc_norm.launch import norm_launch, norm_threads
from qwen4exp_trt.plugins.hc_project.launch import (
    FEW_WARPS,
    TILE_ROWS,
    TILE_TOKENS,
    Projection,
    product_fits,
    project,
)
from qwen4exp_trt.plugins.kernels import F32, Call, Kernel, Launch

_MANY_TOKENS = 1024
"""From here on the normed stack costs more to write than the weight times the gain."""


def launches(call: Call) -> Iterator[Launch]:
    dtype, (streams, hidden, rank) = call["stack"].dtype, (call.dims[name] for name in ("HC", "H", "LR"))
    fits = product_fits(hidden, dtype) and mix_fits(hidden, streams, rank, dtype)
    if fits and call.dims["T"] <= TILE_TOKENS:
        yield from _few_tokens(call)
    elif fits and call.dims["T"] >= _MANY_TOKENS and many_fits(call.dims["T"], hidden, streams, rank):
        yield from _many_tokens(call)
    else:
        yield from _parts(call)


def _few_tokens(call: Call) -> Iterator[Launch]:
    tokens, streams, hidden, rank = (call.dims[name] for name in ("T", "HC", "H", "LR"))
    rows = rank + streams
    row_tiles = -(-rows // TILE_ROWS)
    partial, squares = call.scratch(streams, tokens, row_tiles * TILE_ROWS), call.scratch(tokens, streams)
    room = next(count for count in (1, 2, 4, 8) if count >= tokens)
    sizes = (("HIDDEN", hidden), ("STREAMS", streams))
    operands = [call[name] for name in ("stack", "y", "inject", "gain", "weight", "combined")]
    yield Launch(
        Kernel("hc_read/project.cu", "hc_read_project", (*sizes, ("ROWS", rows), ("TOKENS", room))),
        grid=(row_tiles, streams, 1),
        threads=FEW_WARPS * 32,
        args=(*operands, partial, squares, tokens),
        shared_bytes=4 * FEW_WARPS * TILE_ROWS * TILE_TOKENS + lowrank_bytes(hidden, room),
    )
    operands = [call[name] for name in ("gain", "up_weight", "combined", "mixed", "next_inject")]
    yield Launch(
        Kernel("hc_read/mix.cu", "hc_read_mix", (*sizes, ("RANK", rank))),
        grid=(column_blocks(hidden, streams), 1, 1),
        threads=MIX_WARPS * 32,
        args=(partial, squares, *operands, F32(call.attrs["eps"]), tokens),
        shared_bytes=4 * streams * tokens * rank + lowrank_bytes(rank, TILE_TOKENS),
    )


def _many_tokens(call: Call) -> Iterator[Launch]:
    tokens, streams, hidden, rank = (call.dims[name] for name in ("T", "HC", "H", "LR"))
    rows, dtype, threads = rank + streams, call["stack"].dtype, norm_threads(hidden, call["stack"].dtype)
    lowrank, scales = call.scratch(tokens, rank, dtype=dtype), call.scratch(tokens, streams)
    # At least what the normed stack of the largest smaller step takes.
    weight = call.scratch(max(rows, _MANY_TOKENS), streams * hidden, dtype=dtype)
    operands = [call[name] for name in ("stack", "y", "inject", "gain", "weight", "combined")]
    defines = (("HIDDEN", hidden), ("STREAMS", streams), ("ROWS", rows), ("BLOCK_THREADS", threads))
    yield Launch(
        Kernel("hc_read/combine.cu", "hc_read_combine", defines),
        grid=((rows + tokens) * streams, 1, 1),
        threads=threads,
        args=(*operands, scales, weight, F32(call.attrs["eps"])),
    )
    tensors = (call["combined"], weight, lowrank, call["next_inject"])
    yield from project(call, Projection(*tensors, tokens, rows, streams * hidden, streams, dtype, scales))
    sizes, factors = (tokens, hidden, streams, rank, dtype), (scales, call["gain"])
    yield gate_mix(call, GatedMix(lowrank, call["up_weight"], call["combined"], call["mixed"], *sizes, factors))


def _parts(call: Call) -> Iterator[Launch]:
    tokens, streams, hidden, rank = (call.dims[name] for name in ("T", "HC", "H", "LR"))
    dtype, shape = call["stack"].dtype, call["stack"].shape
    normed, lowrank = call.scratch(*shape, dtype=dtype), call.scratch(tokens, rank, dtype=dtype)
    operands = [call[name] for name in ("stack", "y", "inject", "gain", "combined")]
    args = (*operands, normed, F32(call.attrs["eps"]))
    yield norm_launch("hc_combine_norm", streams, shape, dtype, args)
    tensors = (normed, call["weight"], lowrank, call["next_inject"])
    yield from project(call, Projection(*tensors, tokens, rank + streams, streams * hidden, streams, dtype))
    yield gate_mix(
        call, GatedMix(lowrank, call["up_weight"], normed, call["mixed"], tokens, hidden, streams, rank, dtype)
    )
