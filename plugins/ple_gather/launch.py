"""Launches the copy of table rows, and what it shares with those that dequantize them."""

from __future__ import annotations

from collections.abc import Iterator

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import Arg, Call, Kernel, Launch

THREADS = 128
_WORDS = {16: "uint4", 8: "uint2", 4: "uint32", 2: "uint16"}


def launches(call: Call) -> Iterator[Launch]:
    row_bytes = call.dims["E"] * call["table"].dtype.itemsize
    word = next(size for size in _WORDS if row_bytes % size == 0)
    defines = (("WORD", _WORDS[word]), ("WORDS", row_bytes // word))
    yield gather_launch(call, "ple_gather", defines, row_bytes // word, ("rows", "table"))


def gather_launch(
    call: Call,
    op: str,
    defines: tuple[tuple[str, int | float | str], ...],
    threads_a_row: int,
    operands: tuple[str, ...],
    *more: Arg,
) -> Launch:
    """The one launch of ``op``, whose kernel takes ``operands``, the embedding, its number of threads, and ``more``."""
    count = call.dims["T"] * call.dims["P"] * threads_a_row
    if count >= 2**31:
        raise PluginError(f"{op}: {call.dims['T']} tokens of {call.dims['P']} rows are too many for one launch")
    return Launch(
        Kernel(f"{op}/kernel.cu", op, defines),
        grid=(-(-count // THREADS), 1, 1),
        threads=THREADS,
        args=(*(call[name] for name in operands), call["embedding"], count, *more),
    )


def group_rows(call: Call) -> int:
    """Rows of a table that share one of its ``scales``."""
    rows, scales = call.dims["R"], call.dims["S"]
    if rows % scales or rows >= 2**31:
        raise PluginError(
            f"a table of {rows} rows with {scales} scales, expected fewer than 2^31 rows and scales that divide them"
        )
    return rows // scales
