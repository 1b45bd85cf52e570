"""Launches of steps with many rows: neighbouring rows in tiles that read the union of what they selected."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qwen4exp_trt.plugins.kernels import Arg, Call, Kernel, Launch, ScratchRef, c_type

FEWEST_ROWS = 512
"""Of a step: fewer rows are not enough tiles for all multiprocessors."""
FEWEST_ROWS_PER_SEQUENCE = 9
"""On average; steps of drafts have up to 8."""
WARPS, WARP_ROWS = 4, 16
"""Of a tile, and of each the queries times heads, as in attend_tiles.cu."""
MOST_QUERIES = 8
RATIOS = (0, 2, 4, 8, 16, 32)
TILE_COST, ROW_COST = 4, 3
"""Of a group of tokens, for a tile and for a row alone."""
UNION_THREADS = 512
WINDOW = 65_536
"""Groups whose marks fit into shared memory at once."""
KEYS, STAGES, FP8_STAGES = 32, 3, 2
"""Tokens of a chunk, and chunks in shared memory, as in attend_tiles.cu."""


@dataclass(frozen=True)
class Tiles:
    """Workspace of the tiles; ``is_in_tile`` has a byte for each row."""

    count: int
    queries: int
    max_entries: int
    places: ScratchRef
    entries: ScratchRef
    is_in_tile: ScratchRef


def find_tiles(call: Call) -> Tiles | None:
    """The tiles that a step of this shape may have, or None if its rows are worked on one by one."""
    d, ratio = call.dims, call.attrs["compress_ratio"]
    group = call.attrs["num_heads"] // d["HKV"]
    queries = min(WARPS * WARP_ROWS // group, MOST_QUERIES)
    max_groups = d["MB"] * d["P"] // max(ratio, 1) + 1
    takes_dims = d["D"] % 16 == 0 and d["D"] <= 256 and queries >= 2 and ratio in RATIOS
    if d["T"] < FEWEST_ROWS or not takes_dims or call["qkv"].dtype != torch.bfloat16 or max_groups >> (32 - queries):
        return None
    count = d["T"] // queries + d["B"]
    max_entries = -(-queries * (d["G"] + 1) * ROW_COST // TILE_COST) if ratio else 1
    tiles = Tiles(
        *(count, queries, max_entries, call.scratch(count, 8, dtype=torch.int32)),
        *(call.scratch(count, max_entries, dtype=torch.int32), call.scratch(d["T"], dtype=torch.uint8)),
    )
    return tiles if d["T"] >= FEWEST_ROWS_PER_SEQUENCE * d["B"] else None


def union_launch(call: Call, tiles: Tiles) -> Launch:
    """Finds the tiles and the unions of what their rows selected."""
    d, ratio = call.dims, call.attrs["compress_ratio"]
    window = min(-(-(d["MB"] * d["P"] // max(ratio, 1) + 1) // 512) * 512, WINDOW) if ratio else 512
    defines = (("RATIO", ratio), ("QUERIES", tiles.queries), ("NUM_GROUPS", d["G"]))
    costs = (("MAX_ENTRIES", tiles.max_entries), ("TILE_COST", TILE_COST), ("ROW_COST", ROW_COST))
    return Launch(
        Kernel("qsa_attention/find_unions.cu", "find_unions", (*defines, *costs)),
        grid=(tiles.count, 1, 1),
        threads=UNION_THREADS,
        args=(
            *(call["selected_groups"], call["query_start_loc"], call["seq_lens"], call["num_seqs"]),
            *(tiles.places, tiles.entries, tiles.is_in_tile, d["B"], window),
        ),
        shared_bytes=window,
    )


def tile_launch(call: Call, tiles: Tiles, q: Arg, score_scale: Arg) -> Launch:
    """Attention of the rows in tiles."""
    d, cache = call.dims, call["kv_cache"]
    head_dim, is_fp8 = d["D"], cache.dtype == torch.float8_e4m3fn
    defines = (
        *(("HEAD_DIM", head_dim), ("HQ", call.attrs["num_heads"]), ("HKV", d["HKV"]), ("PAGE", d["P"])),
        *(("RATIO", call.attrs["compress_ratio"]), ("QUERIES", tiles.queries), ("MAX_ENTRIES", tiles.max_entries)),
        *(("CACHE", c_type(cache.dtype)), ("IS_FP8", int(is_fp8)), ("WARPS", WARPS)),
    )
    row_bytes = -(-head_dim // 64) * 128
    chunk_bytes = 2 * KEYS * (FP8_STAGES * row_bytes + 2 * head_dim if is_fp8 else STAGES * row_bytes)
    return Launch(
        Kernel("qsa_attention/attend_tiles.cu", "attend_tiles", defines),
        grid=(tiles.count * d["HKV"], 1, 1),
        threads=32 * WARPS,
        args=(
            *(q, call["qkv"], cache, call["block_table"], tiles.places, tiles.entries, call["out"], d["MB"]),
            score_scale,
        ),
        shared_bytes=chunk_bytes + 4 * 4 * KEYS + 8 * WARPS * WARP_ROWS + 32,
    )
