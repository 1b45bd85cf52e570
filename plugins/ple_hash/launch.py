"""Launches the n-gram hash."""

from __future__ import annotations

from collections.abc import Iterator

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import Call, Kernel, Launch

TILE = 8
"""Tokens of one sequence that a block hashes at once: all of a decoding one."""
BLOCKS_AN_SM = 4
"""Of all sequences together. A sequence has as many blocks as any other; a longer one makes them go round."""


def launches(call: Call) -> Iterator[Launch]:
    tokens, sequences, heads, ngram = (call.dims[name] for name in ("T", "B", "P", "NG"))
    tile = min(TILE, 1024 // heads)
    if heads % (ngram - 1) or tile < ngram - 1:
        raise PluginError(
            f"ple_hash: {heads} heads of n-grams of up to {ngram} tokens; the kernel takes as many heads of each size, "
            f"{1024 // (ngram - 1)} in all"
        )
    if call.dims["RI"] < ngram:
        raise PluginError(f"ple_hash: ngram_ids has {call.dims['RI']} rows a sequence, expected {ngram} or more")
    threads = -(-heads * tile // 32) * 32
    defines = (("HEADS", heads), ("NGRAM", ngram), ("TILE", tile), ("BLOCK", threads))
    operands = ("input_ids", "ngram_ids", "multipliers", "head_sizes", "head_offsets")
    batch = ("query_start_loc", "seq_lens", "slot_ids", "num_seqs")
    yield Launch(
        Kernel("ple_hash/kernel.cu", "ple_hash", defines),
        grid=(min(-(-tokens // tile), max(1, BLOCKS_AN_SM * call.num_sms // (sequences + 1))), sequences + 1, 1),
        threads=threads,
        args=(
            *(call[name] for name in (*operands, *batch, "rows")),
            tokens,
            sequences,
            call.dims["RI"],
            call.attrs["eos_token_id"],
        ),
    )
