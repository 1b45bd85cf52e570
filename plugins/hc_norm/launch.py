"""Launches the grouped RMSNorm, alone or behind the pending combine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from qwen4exp_trt.plugins.kernels import F32, Arg, Call, Kernel, Launch, c_type

MAX_THREADS = 512
VECTORS_A_THREAD = 2
"""Of a stream, with many tokens."""


def launches(call: Call) -> Iterator[Launch]:
    args = (call["stack"], call["gain"], call["normed"], F32(call.attrs["eps"]))
    yield norm_launch(call, "hc_norm", call.attrs["hc_count"], call["stack"].shape, call["stack"].dtype, args)


def norm_launch(
    call: Call, entry: str, streams: int, shape: Sequence[int], dtype: torch.dtype, args: tuple[Arg, ...]
) -> Launch:
    """A norm of a stack of ``shape`` ``[T, W]``: ``entry`` of the kernel with its ``args``.

    With few tokens many threads share a stream, for the shortest time.
    """
    tokens, width = shape
    hidden = width // streams
    items = hidden // vector_of(hidden, dtype)
    few = tokens * streams <= 2 * call.num_sms
    threads = _whole_warps(items if few else -(-items // VECTORS_A_THREAD))
    defines = (
        ("HIDDEN", hidden),
        ("STREAMS", streams),
        ("BLOCK_THREADS", min(threads, MAX_THREADS)),
        ("ACTIVATION", c_type(dtype)),
    )
    kernel = Kernel("hc_norm/kernel.cu", entry, defines)
    return Launch(kernel, (tokens * streams, 1, 1), min(threads, MAX_THREADS), args)


def vector_of(columns: int, dtype: torch.dtype) -> int:
    """Elements that a thread loads at once, as in ``vectors.cuh``."""
    per_load = 16 // dtype.itemsize
    return per_load if columns % per_load == 0 else 1


def _whole_warps(threads: int) -> int:
    return -(-threads // 32) * 32
