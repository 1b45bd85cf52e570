"""Launches the up projection with the gated mean: by tensor cores, else one output at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qwen4exp_trt.plugins.kernels import Arg, Call, Kernel, Launch, c_type

TILE_TOKENS, CHUNK, MAX_RANK = 8, 32, 384
WARPS = 5

_STAGE = 64
_BLOCKS_PER_SM = 2
_MORE_THAN_FEW, _MANY_STREAMS, _MANY_MAX_RANK = 33, 4, 320
"""Tokens from which on, and shapes for which, the kernel for many tokens is taken."""
_MANY_COLUMNS, _MANY_WARPS, _MANY_STAGE, _MANY_STAGES = 64, 8, 16, 4
_MOST_TOKEN_BLOCKS, _START_COST = 16, 4
"""Blocks along the tokens, and what it costs one to load its weights, in stages."""
_ANY_WARPS = 8


@dataclass(frozen=True)
class GatedMix:
    """The operands and the output of one mix, and its sizes."""

    lowrank: Arg
    up_weight: Arg
    normed: Arg
    mixed: Arg
    tokens: int
    hidden: int
    streams: int
    rank: int
    dtype: torch.dtype
    factors: tuple[Arg, ...] = ()
    """Scales of each stream of a token and the gain, if `normed` is to be multiplied by them (`many_fits` only)."""

    @property
    def defines(self) -> tuple[tuple[str, int], ...]:
        return ("HIDDEN", self.hidden), ("STREAMS", self.streams), ("RANK", self.rank)


def launches(call: Call) -> Iterator[Launch]:
    (tokens, rank), streams, mixed = call["lowrank"].shape, call.attrs["hc_count"], call["mixed"]
    lowrank, up_weight, normed = call["lowrank"], call["up_weight"], call["normed"]
    yield gate_mix(
        call, GatedMix(lowrank, up_weight, normed, mixed, tokens, mixed.shape[1], streams, rank, mixed.dtype)
    )


def mix_fits(hidden: int, streams: int, rank: int, dtype: torch.dtype) -> bool:
    whole_tiles = hidden % 2 == 0 and rank % CHUNK == 0 and 8 % streams == 0
    return dtype == torch.bfloat16 and whole_tiles and rank <= MAX_RANK


def column_blocks(hidden: int, streams: int) -> int:
    """Blocks that share the columns of a mix."""
    return -(-hidden // (WARPS * 16 // streams))


def lowrank_bytes(rank: int, tokens: int) -> int:
    """Shared memory for the low ranks of ``tokens``, as in ``gate_mix.cuh``."""
    return 2 * tokens * (rank if rank % 64 else rank + 32)


def gate_mix(call: Call, mix: GatedMix) -> Launch:
    """The launch of ``mix``, whose tensors may be operands of any op."""
    if not mix_fits(mix.hidden, mix.streams, mix.rank, mix.dtype):
        return Launch(
            Kernel(
                "hc_gate_mix/any_shape.cu",
                "hc_gate_mix_any_shape",
                (*mix.defines, ("ACTIVATION", c_type(mix.dtype))),
            ),
            grid=(mix.tokens, -(-mix.hidden // _ANY_WARPS), 1),
            threads=_ANY_WARPS * 32,
            args=(mix.lowrank, mix.up_weight, mix.normed, mix.mixed),
        )
    if many_fits(mix.tokens, mix.hidden, mix.streams, mix.rank):
        return _many_tokens(call, mix)
    stage = TILE_TOKENS if mix.tokens <= TILE_TOKENS else _STAGE
    columns = column_blocks(mix.hidden, mix.streams)
    most = max(_BLOCKS_PER_SM * call.num_sms // columns, 1)
    return Launch(
        Kernel("hc_gate_mix/kernel.cu", "hc_gate_mix", (*mix.defines, ("STAGE", stage))),
        grid=(columns, min(-(-mix.tokens // stage), most), 1),
        threads=WARPS * 32,
        args=(mix.lowrank, mix.up_weight, mix.normed, mix.mixed, mix.tokens),
        shared_bytes=lowrank_bytes(mix.rank, stage),
    )


def many_fits(tokens: int, hidden: int, streams: int, rank: int) -> bool:
    """Whether what `mix_fits` takes the kernel for many tokens."""
    return tokens >= _MORE_THAN_FEW and streams == _MANY_STREAMS and rank <= _MANY_MAX_RANK and hidden % 8 == 0


def _many_tokens(call: Call, mix: GatedMix) -> Launch:
    columns, stages = -(-mix.hidden // _MANY_COLUMNS), -(-mix.tokens // _MANY_STAGE)

    def time(blocks: int) -> int:
        """In stages, of so many blocks along the tokens."""
        return -(-columns * blocks // call.num_sms) * (-(-stages // blocks) + _START_COST)

    stage_bytes = 2 * _MANY_STAGE * (mix.rank + mix.streams * (_MANY_COLUMNS + 2))
    entry = "hc_gate_mix_many_scaled_tokens" if mix.factors else "hc_gate_mix_many_tokens"
    return Launch(
        Kernel("hc_gate_mix/many_tokens.cu", entry, mix.defines),
        grid=(columns, min(range(1, min(stages, _MOST_TOKEN_BLOCKS) + 1), key=time), 1),
        threads=_MANY_WARPS * 32,
        args=(mix.lowrank, mix.up_weight, mix.normed, *mix.factors, mix.mixed, mix.tokens),
        shared_bytes=_MANY_STAGES * stage_bytes,
    )
