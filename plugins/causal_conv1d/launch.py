"""Launches the convolution of the gated delta rule's inputs."""

from __future__ import annotations

from collections.abc import Iterator

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import Call, Kernel, Launch, c_type, item_bytes

BLOCK = 64
CHUNK = 8
"""Rows of a thread, as in the kernel."""


def launches(call: Call) -> Iterator[Launch]:
    tokens, sequences, channels, width, taps, ring = (call.dims[name] for name in ("T", "B", "C", "N", "KW", "RS"))
    dtype = call["x"].dtype
    if not 2 <= taps <= CHUNK + 1 or ring < taps - 1:
        raise PluginError(
            f"causal_conv1d: a kernel of {taps} taps and a state of {ring} rows; expected 2 to {CHUNK + 1} taps and at "
            "least one row less"
        )
    largest = int(16 // item_bytes(dtype))
    smallest = int(4 // item_bytes(dtype))
    if channels % smallest or width % smallest:
        raise PluginError(f"causal_conv1d: {channels} channels of rows {width} wide, expected even numbers of {dtype}")
    vector = next(n for n in (largest, largest // 2, smallest) if channels % n == 0 and width % n == 0)
    defines = (
        ("CHANNELS", channels),
        ("WIDTH", width),
        ("TAPS", taps),
        ("RING", ring),
        ("VECTOR", vector),
        ("BLOCK", BLOCK),
        ("ACTIVATION", c_type(dtype)),
    )
    names = ("x", "weight", "conv_state", "query_start_loc", "seq_lens", "slot_ids", "num_seqs", "out")
    # As many blocks along a sequence as it has chunks when all are equally long.
    chunks = min(max(-(-tokens // (CHUNK * sequences)), 1), 65_535) if sequences else 0
    yield Launch(
        Kernel("causal_conv1d/kernel.cu", "causal_conv1d", defines),
        grid=(-(-channels // (vector * BLOCK)), sequences, chunks if tokens else 0),
        threads=BLOCK,
        args=tuple(call[name] for name in names),
    )
