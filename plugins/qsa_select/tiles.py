"""Launches of steps with many rows: scores of tiles of rows, and their choice, in turns by the lengths at hand."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from qwen4exp_trt.plugins.kernels import Call, Kernel, Launch, ScratchRef

FEWEST_ROWS_PER_SEQUENCE = 16
"""On average; for fewer, tiles have too few rows."""
ROWS, SCORE_THREADS, SCORE_BLOCKS = 64, 256, 2
"""Rows of a tile, threads of a block and blocks that a multiprocessor holds, as in score_tiles.cu."""
CHUNK, STAGES = 64, 3
"""Groups in a stage of shared memory, as in score_tiles.cu."""
SELECT_THREADS, SELECT_BLOCKS = 512, 8
"""Threads of a block of the choice, and blocks that each multiprocessor gets."""
MOST_HEADS, MOST_DIM = 4, 128
MOST_COUNT, MOST_GROUPS = 512, 8192 * 16
"""To select, and to select from, as in select_rows.cu."""


def takes(call: Call, heads: int, count: int) -> bool:
    """Whether a step of this shape is worked on in tiles."""
    d = call.dims
    takes_dims = heads <= MOST_HEADS and d["D"] % 16 == 0 and d["D"] <= MOST_DIM and count <= MOST_COUNT
    takes_step = d["T"] >= FEWEST_ROWS_PER_SEQUENCE * d["B"] and count < d["MB"] * d["G"] <= MOST_GROUPS
    return takes_dims and takes_step and call["index_q"].dtype == torch.bfloat16


def tile_launches(call: Call, heads: int, count: int, scratch: ScratchRef, turns: int) -> Iterator[Launch]:
    """As many ``turns`` as the longest sequences need in the workspace; with shorter ones the last have no rows."""
    d, ratio = call.dims, call.attrs["compress_ratio"]
    tokens, batch_size = d["T"], d["B"]
    score_defines = (("HEADS", heads), ("DIM", d["D"]), ("PAGE", d["G"]))
    choice = (("RATIO", ratio), ("COUNT", count))
    chunks = -(-d["MB"] * d["G"] // CHUNK)
    batch = (call["query_start_loc"], call["seq_lens"])
    for turn in range(turns):
        rows = -(-tokens // (turn + 1))  # no turn has more, however many fit
        tiles = rows // ROWS + batch_size
        at = (turn, tokens, scratch.num_bytes // 4)
        yield Launch(
            Kernel("qsa_select/score_tiles.cu", "score_tiles", (*score_defines, *choice)),
            grid=(max(min(2 * SCORE_BLOCKS * call.num_sms, tiles * chunks), tiles), 1, 1),
            threads=SCORE_THREADS,
            args=(
                *(call["index_q"], call["index_k_cache"], *batch, call["block_table"], call["num_seqs"], scratch),
                *(*at, d["MB"], batch_size),
            ),
            shared_bytes=STAGES * CHUNK * -(-d["D"] // 64) * 128,
        )
        yield Launch(
            Kernel("qsa_select/select_rows.cu", "select_rows", (*choice, ("BLOCK_THREADS", SELECT_THREADS))),
            grid=(min(SELECT_BLOCKS * call.num_sms, rows), 1, 1),
            threads=SELECT_THREADS,
            args=(scratch, *batch, call["num_seqs"], call["selected_groups"], *at, batch_size),
        )
