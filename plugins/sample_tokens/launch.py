"""Launches the sampler: each kernel takes all rows, chunk by chunk, and does nothing for those that are through."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import NUM_SEMAPHORES, Arg, Call, Kernel, Launch, SemaphoreRef, c_type

THREADS = 256
CHUNK = 2048
COUNTERS = 3 * 1408 + 2
"""32-bit words of a row's `RowCounters`."""
MAX_CANDIDATES = 2048


def launches(call: Call) -> Iterator[Launch]:
    rows, vocab_size, limit = call.dims["L"], call.dims["V"], call.attrs["vocab_limit"]
    if rows > NUM_SEMAPHORES:
        raise PluginError(f"q4e::sample_tokens: {rows} rows of logits, expected at most {NUM_SEMAPHORES}")
    extents = (vocab_size, limit if 0 < limit < vocab_size else vocab_size)
    num_chunks = -(-vocab_size // CHUNK)
    chunks, states = call.scratch(rows, num_chunks, 4), call.scratch(rows, 2)
    counters = call.scratch(rows, COUNTERS)
    candidates = call.scratch(rows, MAX_CANDIDATES, dtype=torch.int64)
    winners = call.scratch(rows, num_chunks, dtype=torch.int64)
    logits, raw_logits = call["logits"], call["raw_logits"]
    filters = tuple(call[name] for name in ("temperatures", "top_k", "top_p", "min_p"))
    draw = (call["seeds"], call["offsets"])
    outputs = tuple(call[name] for name in ("token_ids", "logprobs", "ranks"))

    def launch(name: str, *args: Arg) -> Launch:
        kernel = Kernel(f"sample_tokens/{name}.cu", name, (("ACTIVATION", c_type(logits.dtype)),))
        return Launch(kernel, grid=(num_chunks, rows, 1), threads=THREADS, args=(*args, *extents))

    yield launch("stats", logits, raw_logits, chunks, counters, COUNTERS)
    yield launch("histogram", logits, raw_logits, *filters, chunks, states, counters, *outputs)
    scratch = (chunks, states, counters, candidates, SemaphoreRef())
    yield launch("gather", logits, raw_logits, *filters, *draw, *scratch, *outputs)
    yield launch("race", logits, filters[0], *draw, chunks, states, winners)
    yield launch("rank", raw_logits, chunks, states, winners, *outputs)
