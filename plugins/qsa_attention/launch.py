"""Launches the attention: heads prepared and cached, splits of the tokens, their merge."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import F32, Call, Kernel, Launch, c_type, item_bytes
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
RING_BYTES = 64 << 10
"""Shared memory of the tiles that a block has under way: with the rest, three blocks fit into an SM90's."""
MAX_RATIO = 32
BLOCKS_PER_SM = 3
"""Splits are as many as give each multiprocessor so many blocks: fewer leave it idle, more have more to merge."""


def num_splits(rows: int, blocks_per_row: int, units: int, entries: int, num_sms: int) -> int:
    """Into how many blocks the list of a row, of ``units`` that stay together, is split: no more than it has tiles."""
    wanted = num_sms * BLOCKS_PER_SM // max(1, rows * blocks_per_row)
    return max(1, min(wanted, units, -(-entries // TILE)))


def launches(call: Call) -> Iterator[Launch]:
    d, num_heads, ratio = call.dims, call.attrs["num_heads"], call.attrs["compress_ratio"]
    tokens, head_dim, kv_heads = d["T"], d["D"], d["HKV"]
    _check(call)
    qkv, cache = call["qkv"], call["kv_cache"]
    is_float = qkv.dtype == torch.float32
    blocks_per_row = num_heads if is_float else kv_heads * -(-num_heads // kv_heads // MAX_HEADS)
    entries = (d["G"] + 1) * ratio if ratio else d["MB"] * d["P"]
    units = d["G"] + 1 if ratio else -(-entries // TILE)
    splits = num_splits(tokens, blocks_per_row, units, entries, call.num_sms)
    # One split needs no parts, except in float32. As a bound of rows * splits this does not shrink when a dim grows.
    parts = min(call.num_sms * BLOCKS_PER_SM // blocks_per_row, tokens * -(-entries // TILE))
    parts = max(parts, tokens) if is_float else parts
    q = call.scratch(tokens, num_heads, head_dim, dtype=qkv.dtype)
    part_width = -(-head_dim // SLAB) * SLAB
    partial_out, partial_sums = call.scratch(parts, num_heads, part_width), call.scratch(parts, num_heads, 2)

    batch = (call["query_start_loc"], call["seq_lens"], call["block_table"], call["num_seqs"])
    heads = (("HEAD_DIM", head_dim), ("HQ", num_heads), ("HKV", kv_heads))
    types = (("ACTIVATION", c_type(qkv.dtype)),)
    in_cache = (("PAGE", d["P"]), ("CACHE", c_type(cache.dtype)))
    section = call.attrs["mrope_section"]
    rope = (("HALF", d["R"]), ("MROPE_HEIGHT", 3 * section[1]), ("MROPE_WIDTH", 3 * section[2]))
    score_scale = F32(head_dim**-0.5 * math.log2(math.e))
    tiles = find_tiles(call)
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
    selected, grid = (call["selected_groups"], cache, *batch), (tokens * blocks_per_row, splits, 1)
    if is_float:
        yield Launch(
            Kernel("qsa_attention/attend_float.cu", "attend_float", (*heads, *in_cache, ("RATIO", ratio))),
            grid=grid,
            threads=THREADS,
            args=(q, *selected, partial_out, partial_sums, d["G"], d["B"], d["MB"], score_scale),
        )
    else:
        tile_bytes, shared_bytes = _shared_bytes(head_dim, num_heads // kv_heads, item_bytes(cache.dtype))
        stages = max(1, min(RING_BYTES // tile_bytes, -(-entries // splits // TILE)))
        variant = (("RATIO", ratio), ("STAGES", stages), ("IS_SPLIT", int(is_split)))
        beside = ("BESIDE_TILES", int(tiles is not None))
        yield Launch(
            Kernel("qsa_attention/attend.cu", "attend", (*heads, *in_cache, *variant, beside)),
            grid=grid,
            threads=THREADS,
            args=(
                *(q, qkv, *selected, partial_out, partial_sums, call["out"]),
                *(partial_sums if tiles is None else tiles.is_in_tile, d["G"], d["B"], d["MB"], score_scale),
            ),
            shared_bytes=stages * tile_bytes + shared_bytes,
        )
    if not is_split:
        return
    slices = min(-(-splits // MERGE_AHEAD), MERGE_SLICES)
    yield Launch(
        Kernel("qsa_attention/merge.cu", "merge", (*heads, *types)),
        grid=(tokens * num_heads * (part_width // SLAB), 1, 1),
        threads=max(SLAB, -(-slices * SLAB // 4 // 32) * 32),
        args=(partial_out, partial_sums, qkv, call["query_start_loc"], call["num_seqs"], call["out"], splits, slices),
        shared_bytes=4 * (slices * SLAB + splits),
    )


def _shared_bytes(head_dim: int, group: int, cache_item_bytes: float) -> tuple[int, int]:
    """Of a tile in the ring, keys and values in whole chunks of a warp, and of queries and scores, as in attend.cu."""
    heads, chunks = min(group, MAX_HEADS), -(-head_dim // 32)
    slabs = -(-head_dim // (SLAB * THREADS // 32))
    tile = TILE * (32 * chunks + SLAB * THREADS // 32 * slabs) * int(cache_item_bytes)
    return tile, heads * (64 * chunks + 2 * 4 * TILE)


def _check(call: Call) -> None:
    """`PluginError` for dims that the kernels do not take."""
    head_dim, half, num_heads, kv_heads = call.dims["D"], call.dims["R"], call.attrs["num_heads"], call.dims["HKV"]
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise PluginError(f"q4e::qsa_attention: head_dim is {head_dim}, expected a multiple of 8 up to {MAX_HEAD_DIM}")
    if 2 * half > head_dim:
        raise PluginError(f"q4e::qsa_attention: {half} frequencies rotate {2 * half} dims, but head_dim is {head_dim}")
    if call.attrs["compress_ratio"] > MAX_RATIO:
        raise PluginError(
            f"q4e::qsa_attention: compress_ratio is {call.attrs['compress_ratio']}, expected up to {MAX_RATIO}"
        )
    if num_heads % kv_heads:
        raise PluginError(f"q4e::qsa_attention: {num_heads} query heads are no multiple of {kv_heads} key heads")
