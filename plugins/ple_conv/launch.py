"""Launches the gates of the n-gram embedding, and its convolution."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import F32, Arg, Call, Kernel, Launch, c_type

CONV_BLOCK, CONV_VECTOR = 128, 4
GATE_BLOCKS_AN_SM, CONV_BLOCKS_AN_SM = 3, 8
"""Blocks that a multiprocessor runs at once; more tokens than they are make blocks go round."""

_GATE = ("stack", "key", "value", "key_gain", "query_gain")
_CONV = ("stack", "value", "conv_gain", "conv_weight", "ple_conv_state")
_BATCH = ("query_start_loc", "seq_lens", "slot_ids", "num_seqs")
_MANY_TOKENS, _MANY_A_SEQUENCE = 256, 16
"""From here on, in all and for each sequence, threads go over runs of tokens."""
_LONGEST_RUN, _SHORTEST_RUN, _RUNS_AN_SM = 64, 16, 5
"""Tokens of a run, and how many runs keep a multiprocessor busy."""


def launches(call: Call) -> Iterator[Launch]:
    tokens, sequences = call.dims["T"], call.dims["B"]
    many = tokens >= max(_MANY_TOKENS, _MANY_A_SEQUENCE * sequences)
    yield from (_many_tokens if many else _few_tokens)(call, _sizes(call))


@dataclass(frozen=True)
class _Sizes:
    streams: int
    gate_block: int
    column_blocks: int
    defines: tuple[tuple[str, int | str], ...]


def _sizes(call: Call) -> _Sizes:
    width, hidden, taps, ring = (call.dims[name] for name in ("W", "H", "KW", "RC"))
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
        ("GATE_BLOCK", gate_block),
        ("ACTIVATION", c_type(call["stack"].dtype)),
    )
    return _Sizes(streams, gate_block, column_blocks, defines)


def _few_tokens(call: Call, sizes: _Sizes) -> Iterator[Launch]:
    tokens, sequences, column_blocks = call.dims["T"], call.dims["B"], sizes.column_blocks
    defines = (*sizes.defines, ("CONV_BLOCKS_AN_SM", CONV_BLOCKS_AN_SM))
    gates, num_counters = call.scratch(tokens, sizes.streams, 2), sequences * column_blocks
    counters = call.scratch(num_counters, dtype=torch.int32)
    yield Launch(
        Kernel("ple_conv/kernel.cu", "ple_gate", defines),
        grid=(sizes.streams * min(tokens, _gate_blocks(call, sizes)), 1, 1),
        threads=sizes.gate_block,
        args=(*_operands(call, _GATE), gates, counters, num_counters, tokens, F32(call.attrs["eps"])),
    )
    yield Launch(
        Kernel("ple_conv/kernel.cu", "ple_conv", defines),
        grid=(column_blocks * min(tokens, max(1, call.num_sms * CONV_BLOCKS_AN_SM // column_blocks)), 1, 1),
        threads=CONV_BLOCK,
        args=(*_operands(call, _CONV + _BATCH), gates, counters, call["out"], tokens, sequences),
    )


def _many_tokens(call: Call, sizes: _Sizes) -> Iterator[Launch]:
    tokens, sequences, column_blocks = call.dims["T"], call.dims["B"], sizes.column_blocks
    gates, source = call.scratch(tokens, sizes.streams, 2), "ple_conv/many_tokens.cu"
    call.scratch(sequences * column_blocks, dtype=torch.int32)  # as much as any smaller step takes
    yield Launch(
        Kernel(source, "ple_gate_many", sizes.defines),
        grid=(sizes.streams * min(-(-tokens // 2), _gate_blocks(call, sizes)), 1, 1),
        threads=sizes.gate_block,
        args=(*_operands(call, _GATE), gates, tokens, F32(call.attrs["eps"])),
    )
    run = min(max(tokens * column_blocks // (_RUNS_AN_SM * call.num_sms), _SHORTEST_RUN), _LONGEST_RUN)
    yield Launch(
        Kernel(source, "ple_conv_many", sizes.defines),
        grid=(column_blocks, -(-tokens // run), 1),
        threads=CONV_BLOCK,
        args=(*_operands(call, _CONV + _BATCH), gates, call["out"], tokens, run),
    )
    yield Launch(
        Kernel(source, "ple_store_state", sizes.defines),
        grid=(column_blocks, sequences, 1),
        threads=CONV_BLOCK,
        args=(*_operands(call, ("value", "conv_gain", "ple_conv_state", *_BATCH)), gates),
    )


def _operands(call: Call, names: Sequence[str]) -> tuple[Arg, ...]:
    return tuple(call[name] for name in names)


def _gate_blocks(call: Call, sizes: _Sizes) -> int:
    """At most, for each stream."""
    return max(1, call.num_sms * GATE_BLOCKS_AN_SM // sizes.streams)
