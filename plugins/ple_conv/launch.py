"""Launches the gates of the n-gram embedding, and its convolution."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import F32, Call, Kernel, Launch, c_type

CONV_BLOCK, CONV_VECTOR = 128, 4
GATE_BLOCKS_AN_SM, CONV_BLOCKS_AN_SM = 3, 8
"""Blocks that a multiprocessor runs at once; more tokens than they are make blocks go round."""


def launches(call: Call) -> Iterator[Launch]:
    tokens, sequences, width, hidden, taps, ring = (call.dims[name] for name in ("T", "B", "W", "H", "KW", "RC"))
    dilation, streams = call.attrs["dilation"], width // hidden
    vector = next(size for size in (8, 4, 2, 1) if hidden % size == 0)
    if width % hidden or hidden > 1024 * vector:
        raise PluginError(
            f"ple_conv: a stack {width} wide of streams {hidden} wide; the kernel takes whole streams of at most 1024 "
            "columns, up to 8192 if a power of two divides them"
        )
    if ring <= (taps - 1) * dilation:
        raise PluginError(f"ple_conv: a state of {ring} rows, expected more than {(taps - 1) * dilation}")
    gate_block, column_blocks = -(-hidden // vector // 32) * 32, -(-width // (CONV_BLOCK * min(vector, CONV_VECTOR)))
    defines = (
        ("STREAMS", streams),
        ("HIDDEN", hidden),
        ("TAPS", taps),
        ("DILATION", dilation),
        ("RING", ring),
        ("VECTOR", vector),
        ("CONV_VECTOR", min(vector, CONV_VECTOR)),
        ("CONV_BLOCKS_AN_SM", CONV_BLOCKS_AN_SM),
        ("GATE_BLOCK", gate_block),
        ("ACTIVATION", c_type(call["stack"].dtype)),
    )
    gates, num_counters = call.scratch(tokens, streams, 2), sequences * column_blocks
    counters = call.scratch(num_counters, dtype=torch.int32)
    inputs = tuple(call[name] for name in ("stack", "key", "value", "key_gain", "query_gain"))
    yield Launch(
        Kernel("ple_conv/kernel.cu", "ple_gate", defines),
        grid=(streams * min(tokens, max(1, call.num_sms * GATE_BLOCKS_AN_SM // streams)), 1, 1),
        threads=gate_block,
        args=(*inputs, gates, counters, num_counters, tokens, F32(call.attrs["eps"])),
    )
    inputs = tuple(call[name] for name in ("stack", "value", "conv_gain", "conv_weight", "ple_conv_state"))
    batch = tuple(call[name] for name in ("query_start_loc", "seq_lens", "slot_ids", "num_seqs"))
    yield Launch(
        Kernel("ple_conv/kernel.cu", "ple_conv", defines),
        grid=(column_blocks * min(tokens, max(1, call.num_sms * CONV_BLOCKS_AN_SM // column_blocks)), 1, 1),
        threads=CONV_BLOCK,
        args=(*inputs, *batch, gates, counters, call["out"], tokens, sequences),
    )
