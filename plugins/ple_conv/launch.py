"""Launches the gate and convolution of the n-gram embedding."""

from __future__ import annotations

from collections.abc import Iterator

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import F32, NUM_SEMAPHORES, Call, Kernel, Launch, SemaphoreRef, c_type

_OPERANDS = ("stack", "key", "value", "key_gain", "query_gain", "conv_gain", "conv_weight", "ple_conv_state")
_BATCH = ("query_start_loc", "seq_lens", "slot_ids", "num_seqs")


def launches(call: Call) -> Iterator[Launch]:
    tokens, sequences, width, hidden, taps, ring = (call.dims[name] for name in ("T", "B", "W", "H", "KW", "RC"))
    streams, vector = width // hidden, next(size for size in (8, 4, 2, 1) if hidden % size == 0)
    if width % hidden or hidden > 1024 * vector:
        raise PluginError(
            f"ple_conv: a stack {width} wide of streams {hidden} wide; the kernel takes whole streams of at most 1024 "
            "columns, up to 8192 if a power of two divides them"
        )
    if ring <= (taps - 1) * call.attrs["dilation"]:
        raise PluginError(f"ple_conv: a state of {ring} rows, expected more than {(taps - 1) * call.attrs['dilation']}")
    if sequences * streams > NUM_SEMAPHORES:
        raise PluginError(f"ple_conv: {sequences} sequences, expected at most {NUM_SEMAPHORES // streams}")
    defines = (
        ("STREAMS", streams),
        ("HIDDEN", hidden),
        ("TAPS", taps),
        ("DILATION", call.attrs["dilation"]),
        ("RING", ring),
        ("VECTOR", vector),
        ("BLOCK", -(-hidden // vector // 32) * 32),
        ("ACTIVATION", c_type(call["stack"].dtype)),
    )
    yield Launch(
        Kernel("ple_conv/kernel.cu", "ple_conv", defines),
        grid=(tokens * streams, 1, 1),
        threads=-(-hidden // vector // 32) * 32,
        args=(
            *(call[name] for name in (*_OPERANDS, *_BATCH, "out")),
            call.scratch(tokens, streams),
            SemaphoreRef(),
            sequences,
            F32(call.attrs["eps"]),
        ),
    )
