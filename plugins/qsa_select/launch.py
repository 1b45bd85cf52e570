"""Launches the selection: scores of as many rows as the workspace holds, then the choice for each of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import Call, Kernel, Launch, c_type
from qwen4exp_trt.plugins.qsa_select.tiles import takes, tile_launches

GROUPS = 16
"""Groups of an item of the scores, which share a best score, as in score.cuh and select.cu."""
SCORE_THREADS = 128
SCORE_BLOCKS = 4
"""Blocks of scores a multiprocessor. Its registers hold a fifth, which makes them no faster."""
TILE_ROWS = 32
"""Rows of a sequence that share a read of its keys."""
SELECT_THREADS = (128, 512)
SCORES_PER_THREAD = 16
"""Scores that a block of the choice holds, for each of its threads, as in select.cu."""
CANDIDATE_BYTES = 160
"""Shared memory of the choice's candidates, for each of its threads, as in select.cu."""
SCRATCH_BYTES = 128 << 20
"""Of scores. The rows of a larger step are worked on in turns."""


def launches(call: Call) -> Iterator[Launch]:
    dims, attrs = call.dims, call.attrs
    ratio, count = attrs["compress_ratio"], attrs["budget"] // attrs["compress_ratio"]
    tokens, batch_size, max_groups = dims["T"], dims["B"], dims["MB"] * dims["G"]
    heads = _heads(call)
    max_items = -(-max_groups // GROUPS)
    row_stride = max_items * (GROUPS + 1) + -max_items % 4  # of uint4
    scratch_bytes = min(tokens * 4 * row_stride, max(SCRATCH_BYTES, 4 * row_stride))
    needs_scores = max_groups > count
    scratch = call.scratch(scratch_bytes if needs_scores else 0, dtype=torch.uint8)
    rows_at_once = max(1, scratch_bytes // (4 * row_stride)) if needs_scores else tokens
    if takes(call, heads, count):
        yield from tile_launches(call, heads, count, scratch, -(-tokens // rows_at_once))
        return
    score = _score_kernel(call, heads, ratio, count)
    least, most = SELECT_THREADS
    threads = min(max(1 << (-(-max_groups // SCORES_PER_THREAD) - 1).bit_length(), least), most)
    defines = (("RATIO", ratio), ("COUNT", count), ("BLOCK_THREADS", threads), ("SCORED", int(needs_scores)))
    select = Kernel("qsa_select/select.cu", "select_groups", defines)
    for first in range(0, tokens, rows_at_once):
        rows = min(rows_at_once, tokens - first)
        if needs_scores:
            # One multiprocessor is left to a block of the choice, which is then in place when the scores are.
            blocks = min(SCORE_BLOCKS * max(call.num_sms - 1, 1), (batch_size + rows // TILE_ROWS) * max_items)
            yield Launch(
                score,
                grid=(blocks, 1, 1),
                threads=SCORE_THREADS,
                args=(
                    *(call[name] for name in ("index_q", "index_k_cache", "query_start_loc", "seq_lens")),
                    *(call["block_table"], call["num_seqs"], scratch, first, rows),
                    *(row_stride, max_items, dims["MB"], batch_size),
                ),
                shared_bytes=4 * (batch_size + 1),
            )
        yield Launch(
            select,
            grid=(rows, 1, 1),
            threads=threads,
            shared_bytes=CANDIDATE_BYTES * threads,
            args=(
                *(scratch, call["query_start_loc"], call["seq_lens"], call["num_seqs"], call["selected_groups"]),
                *(first, row_stride, max_items, batch_size),
            ),
        )


def _heads(call: Call) -> int:
    dim, count = call.dims["D"], call.attrs["budget"] // call.attrs["compress_ratio"]
    heads, remainder = divmod(call.dims["N"], dim)
    if remainder or heads == 0 or count == 0:
        raise PluginError(
            f"q4e::qsa_select: N={call.dims['N']}, D={dim}, budget={call.attrs['budget']}; expected N a multiple of D "
            f"and a budget of at least one group of compress_ratio={call.attrs['compress_ratio']} tokens"
        )
    if call["index_q"].dtype == torch.bfloat16 and (heads > 8 or dim % 8):
        raise PluginError(
            f"q4e::qsa_select: {heads} index heads of D={dim}; expected up to 8 heads and D a multiple of 8"
        )
    return heads


def _score_kernel(call: Call, heads: int, ratio: int, count: int) -> Kernel:
    dtype = call["index_q"].dtype
    name = "score_bf16" if dtype == torch.bfloat16 else "score_f32"
    defines = (
        *(("ACTIVATION", c_type(dtype)), ("HEADS", heads), ("DIM", call.dims["D"]), ("RATIO", ratio)),
        *(("PAGE", call.dims["G"]), ("COUNT", count), ("TILE_ROWS", TILE_ROWS), ("BLOCK_THREADS", SCORE_THREADS)),
    )
    return Kernel(f"qsa_select/{name}.cu", name, defines)
