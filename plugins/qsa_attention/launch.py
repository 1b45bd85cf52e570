"""Launches the attention: heads prepared and cached, splits of the tokens, their merge."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import F32, Call, Kernel, Launch, ScratchRef, c_type
from qwen4exp_trt.plugins.qsa_attention.tiles import find_tiles, tile_launch, union_launch

THREADS = 128
MERGE_SLICES = 16
MERGE_AHEAD = 9
"""Splits of which a thread of the merge has all loads under way together."""
TILE = 32
"""Tokens that a block takes at once."""
MAX_HEADS = 16
"""Query heads of a key head that a block takes."""
MAX_HEAD_DIM = 512
SLAB = 64
"""Output columns that a block of the merge has."""
BLOCKS_PER_SM = 3
"""Splits are as many as give each multiprocessor so many blocks: fewer leave it idle, more have more to merge."""


def num_splits(rows: int, blocks_per_row: int, tiles: int, num_sms: int) -> int:
    """Into how many blocks the tokens of a row are split, each with as many ``tiles`` as the longest."""
    wanted = min(max(1, num_sms * BLOCKS_PER_SM // max(1, rows * blocks_per_row)), tiles)
    return -(-tiles // -(-tiles // wanted))


def launches(call: Call) -> Iterator[Launch]:
    d, num_heads, ratio = call.dims, call.attrs["num_heads"], call.attrs["compress_ratio"]
    tokens, head_dim, kv_heads = d["T"], d["D"], d["HKV"]
    _check(call)
    qkv, cache = call["qkv"], call["kv_cache"]
    is_float = qkv.dtype == torch.float32
    blocks_per_row = num_heads if is_float else kv_heads * -(-num_heads // kv_heads // MAX_HEADS)
    entries = (d["G"] + 1) * ratio if ratio else d["MB"] * d["P"]
    splits = num_splits(tokens, blocks_per_row, -(-entries // TILE), call.num_sms)
    # One split needs no parts, except in float32. As a bound of rows * splits this does not shrink when a dim grows.
    parts = min(call.num_sms * BLOCKS_PER_SM // blocks_per_row, tokens * -(-entries // TILE))
    parts = max(parts, tokens) if is_float else parts
    q = call.scratch(tokens, num_heads, head_dim, dtype=qkv.dtype)
    part_width = -(-head_dim // SLAB) * SLAB
    partial_out, partial_sums = call.scratch(parts, num_heads, part_width), call.scratch(parts, num_heads, 2)
    tiles = find_tiles(call)
    score_scale = F32(head_dim**-0.5 * math.log2(math.e))

    batch = (call["query_start_loc"], call["seq_lens"], call["block_table"], call["num_seqs"])
    heads = (("HEAD_DIM", head_dim), ("HQ", num_heads), ("HKV", kv_heads))
    types = (("ACTIVATION", c_type(qkv.dtype)),)
    in_cache = (("PAGE", d["P"]), ("CACHE", c_type(cache.dtype)))
    section = call.attrs["mrope_section"]
    rope = (("HALF", d["R"]), ("MROPE_HEIGHT", 3 * section[1]), ("MROPE_WIDTH", 3 * section[2]))
    if tiles is not None:
        splits = 1
        yield union_launch(call, tiles)
    yield Launch(
        Kernel("qsa_attention/prepare.cu", "prepare", (*heads, *types, *in_cache, *rope)),
        grid=(-(-tokens * (num_heads + 2 * kv_heads) // (THREADS // 32)), 1, 1),
        threads=THREADS,
        args=(
            *(qkv, call["q_gain"], call["k_gain"], call["positions"], call["inv_freq"], cache, *batch),
            *(q, tokens, d["B"], d["MB"], F32(call.attrs["eps"])),
        ),
    )
    if tiles is not None:
        yield tile_launch(call, tiles, q, score_scale)
        if ratio == 0:
            return  # all rows are in tiles
    is_split = is_float or splits > 1
    flags = (("IS_SPLIT", int(is_split)), ("BESIDE_TILES", int(tiles is not None)))
    name, variant = ("attend_float", ()) if is_float else ("attend", flags)
    is_in_tile = partial_sums if tiles is None else tiles.is_in_tile
    gates_and_out = ((), ()) if is_float else ((qkv,), (call["out"], is_in_tile))
    yield Launch(
        Kernel(f"qsa_attention/{name}.cu", name, (*heads, *in_cache, ("RATIO", ratio), *variant)),
        grid=(tokens * blocks_per_row, splits, 1),
        threads=THREADS,
        args=(
            *(q, *gates_and_out[0], call["selected_groups"], cache, *batch, partial_out, partial_sums),
            *(*gates_and_out[1], d["G"], d["B"], d["MB"], score_scale),
        ),
    )
    if is_split:
        yield _merge(call, (*heads, *types), splits, (partial_out, partial_sums))


def _merge(
    call: Call, defines: tuple[tuple[str, int | float | str], ...], splits: int, parts: tuple[ScratchRef, ScratchRef]
) -> Launch:
    """Joins the ``splits`` of each head."""
    tokens, num_heads, part_width = call.dims["T"], call.attrs["num_heads"], -(-call.dims["D"] // SLAB) * SLAB
    slices = min(-(-splits // MERGE_AHEAD), MERGE_SLICES)
    batch = (call["query_start_loc"], call["num_seqs"])
    return Launch(
        Kernel("qsa_attention/merge.cu", "merge", defines),
        grid=(tokens * num_heads * (part_width // SLAB), 1, 1),
        threads=max(SLAB, -(-slices * SLAB // 4 // 32) * 32),
        args=(*parts, call["qkv"], *batch, call["out"], splits, slices),
        shared_bytes=4 * (slices * SLAB + splits),
    )


def _check(call: Call) -> None:
    """`PluginError` for dims that the kernels do not take."""
    head_dim, half, num_heads, kv_heads = call.dims["D"], call.dims["R"], call.attrs["num_heads"], call.dims["HKV"]
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise PluginError(f"q4e::qsa_attention: head_dim is {head_dim}, expected a multiple of 8 up to {MAX_HEAD_DIM}")
    if 2 * half > head_dim:
        raise PluginError(f"q4e::qsa_attention: {half} frequencies rotate {2 * half} dims, but head_dim is {head_dim}")
    if num_heads % kv_heads:
        raise PluginError(f"q4e::qsa_attention: {num_heads} query heads are no multiple of {kv_heads} key heads")
