"""Launches the grouped RMSNorm, alone or behind the pending combine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from qwen4exp_trt.plugins.kernels import F32, Arg, Call, Kernel, Launch, c_type

MAX_THREADS = 512


def launches(call: Call) -> Iterator[Launch]:
    args = (call["stack"], call["gain"], call["normed"], F32(call.attrs["eps"]))
    yield norm_launch("hc_norm", call.attrs["hc_count"], call["stack"].shape, call["stack"].dtype, args)


def norm_launch(entry: str, streams: int, shape: Sequence[int], dtype: torch.dtype, args: tuple[Arg, ...]) -> Launch:
    """A norm of a stack of ``shape`` ``[T, W]``: ``entry`` of the kernel with its ``args``."""
    tokens, width = shape
    hidden = width // streams
    threads = norm_threads(hidden, dtype)
    defines = (("HIDDEN", hidden), ("STREAMS", streams), ("BLOCK_THREADS", threads), ("ACTIVATION", c_type(dtype)))
    return Launch(Kernel("hc_norm/kernel.cu", entry, defines), (tokens * streams, 1, 1), threads, args)


def norm_threads(hidden: int, dtype: torch.dtype) -> int:
    """Of a block that has a stream of a token."""
    return min(-(-hidden // vector_of(hidden, dtype) // 32) * 32, MAX_THREADS)


def vector_of(columns: int, dtype: torch.dtype) -> int:
    """Elements that a thread loads at once, as in ``vectors.cuh``."""
    per_load = 16 // dtype.itemsize
    return per_load if columns % per_load == 0 else 1
