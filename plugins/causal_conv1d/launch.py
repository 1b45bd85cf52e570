"""Launches the convolution of the gated delta rule's inputs."""

from __future__ import annotations

from collections.abc import Iterator

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import Call, Kernel, Launch, c_type, item_bytes

_WARP, _CHUNK = 32, 8
"""Lanes along the channels, and the most rows of a block."""
_MOST_CHUNKS = 32
"""Of blocks along a sequence; with more rows, a thread loads its weights once for several."""


def launches(call: Call) -> Iterator[Launch]:
    tokens, sequences, channels, width, taps, ring = (call.dims[name] for name in ("T", "B", "C", "N", "KW", "RS"))
    dtype = call["x"].dtype
    if not 2 <= taps <= _CHUNK + 1 or ring < taps - 1:
        raise PluginError(
            f"causal_conv1d: a kernel of {taps} taps and a state of {ring} rows; expected 2 to {_CHUNK + 1} taps and "
            "at least one row less"
        )
    largest = int(16 // item_bytes(dtype))
    smallest = int(4 // item_bytes(dtype))
    if channels % smallest or width % smallest:
        raise PluginError(f"causal_conv1d: {channels} channels of rows {width} wide, expected even numbers of {dtype}")
    vector = next(n for n in (largest, largest // 2, smallest) if channels % n == 0 and width % n == 0)
    # A row a sequence, or as many blocks along a sequence as it has chunks when all are equally long.
    chunk = 1 if tokens <= sequences else _CHUNK
    chunks = min(-(-tokens // (chunk * max(sequences, 1))), _MOST_CHUNKS)
    defines = (
        ("CHANNELS", channels),
        ("WIDTH", width),
        ("TAPS", taps),
        ("RING", ring),
        ("VECTOR", vector),
        ("CHUNK", chunk),
        ("ACTIVATION", c_type(dtype)),
    )
    names = ("x", "weight", "conv_state", "query_start_loc", "seq_lens", "slot_ids", "num_seqs", "out")
    yield Launch(
        Kernel("causal_conv1d/kernel.cu", "causal_conv1d", defines),
        grid=(-(-channels // (vector * _WARP)), sequences, chunks),
        threads=chunk * _WARP,
        args=tuple(call[name] for name in names),
    )
