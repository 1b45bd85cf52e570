"""Launches the chunked gated delta rule, for the long sequences of a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from qwen4exp_trt.plugins.kernels import F32, Call, Kernel, Launch, ScratchRef, c_type

_ROWS, _TILE, _WARP, _PAD = 64, 16, 32, 8
_SLICE = 64
_TRIANGLE = 10
_TILE_BYTES = 16 * _WARP
_BATCH = ("query_start_loc", "seq_lens", "slot_ids", "num_seqs")
LONGEST = 16
"""Rows of a sequence that the kernel of few rows still takes beside the chunked ones."""


def chunk_launches(call: Call) -> list[Launch]:
    """The launches for sequences of more than `LONGEST` rows; none where a step of this shape is for the other kernel.

    The workspace is that of any step of at most as many rows and sequences.
    """
    dims, repeats = call.dims, call.dims["HV"] // call.attrs["num_k_heads"]
    is_possible = dims["K"] in (32, 64, 128) and dims["V"] % _SLICE == 0 and dims["HV"] % 4 == 0 and repeats <= 4
    if not is_possible or call["conv_out"].dtype != torch.bfloat16 or dims["T"] < _least_rows(call, 1):
        return []
    memories = _Memory.of(call), _Memory.of(call)
    return list(_turns(call, memories)) if dims["T"] >= _least_rows(call, dims["B"]) else []


def _least_rows(call: Call, sequences: int) -> int:
    return call.dims["R"] // 2 * sequences + _ROWS


def turn_chunks(call: Call) -> int:
    """Chunks of a turn, of about ``num_sms / 8``, so that what the kernels hand to each other stays in the L2 cache."""
    turns = max(round(_most_chunks(call) / _target(call)), 1)
    return -(-_most_chunks(call) // turns)


def _target(call: Call) -> int:
    return max(call.num_sms // 8, 2)


def _most_chunks(call: Call) -> int:
    """A bound on the chunks of all long sequences: each may have a last one with a row, and rows to replay."""
    sequences = min(call.dims["B"], call.dims["T"] // (LONGEST + 1))
    return max((call.dims["T"] + (_ROWS - 1 + call.dims["R"] // 2 - 1) * sequences) // _ROWS, 1)


@dataclass(frozen=True)
class _Memory:
    """What the kernels of a turn hand to each other: keys, queries, solve, scores, decays; norms."""

    prepared: tuple[ScratchRef, ...]
    norms: ScratchRef

    @classmethod
    def of(cls, call: Call) -> _Memory:
        # A turn has up to half as many chunks more than it should. Not of `turn_chunks`, which falls now and then.
        chunks = min(_most_chunks(call), -(-3 * _target(call) // 2))
        heads, k_heads, key_dim, value_dim = (call.dims[name] for name in ("HV", "num_k_heads", "K", "V"))
        rows = chunks * k_heads * _ROWS * key_dim
        tiles = chunks * heads * _TRIANGLE * _TILE_BYTES
        prepared = (
            call.scratch(rows, dtype=torch.float16),
            call.scratch(rows, dtype=torch.float16),
            call.scratch(tiles, dtype=torch.uint8),
            call.scratch(tiles, dtype=torch.uint8),
            call.scratch(chunks, heads, 2, _ROWS),
        )
        return cls(prepared, call.scratch(chunks, heads, value_dim // _SLICE, _ROWS))


def _turns(call: Call, memories: tuple[_Memory, _Memory]) -> Iterator[Launch]:
    """Turn by turn. While one is scanned, the next is prepared, and the one before it finished, in other memory."""
    window = turn_chunks(call)
    turns = -(-_most_chunks(call) // window)
    for turn in range(turns):
        if turn > 1:
            yield _finish(call, memories[turn % 2], window, turn - 2, waits_first=False)
        yield _prepare(call, memories[turn % 2], window, turn)
        yield _scan(call, memories[turn % 2], window, turn)
    if turns > 1:
        yield _finish(call, memories[turns % 2], window, turns - 2, waits_first=False)
    yield _finish(call, memories[(turns - 1) % 2], window, turns - 1, waits_first=True)


def _kernel(call: Call, name: str, **defines: int) -> Kernel:
    dims = call.dims
    shared = {
        "K_HEADS": call.attrs["num_k_heads"],
        "V_HEADS": dims["HV"],
        "KEY_DIM": dims["K"],
        "VALUE_DIM": dims["V"],
        "DRAFTS": dims["R"] // 2,
        "LONGEST": LONGEST,
        "ACTIVATION": c_type(call["conv_out"].dtype),
    }
    return Kernel(f"gated_delta_rule/{name}.cu", name, (*shared.items(), *defines.items()))


def _operands(call: Call, *names: str) -> tuple:
    return tuple(call[name] for name in names)


def _prepare(call: Call, memory: _Memory, window: int, turn: int) -> Launch:
    key_dim, k_heads = call.dims["K"], call.attrs["num_k_heads"]
    repeats = call.dims["HV"] // k_heads
    tiles = repeats * _ROWS // _TILE
    shared_bytes = 2 * _ROWS * 2 * (key_dim + _PAD) + repeats * _TRIANGLE * _TILE_BYTES
    shared_bytes += tiles * _TILE * (4 * (_TILE + 4) + 2 * (_TILE + _PAD)) + 8 * repeats * _ROWS
    names = ("conv_out", "ba", "A_log", "dt_bias", "draft_rows", "committed_len", *_BATCH)
    return Launch(
        _kernel(call, "prepare", SHARED_BYTES=shared_bytes, MIN_BLOCKS=3),
        grid=(k_heads, window, 1),
        threads=_TRIANGLE * _WARP,
        args=(*_operands(call, *names), *memory.prepared, call.dims["B"], turn * window, int(turn == 0)),
        shared_bytes=shared_bytes,
    )


def _scan(call: Call, memory: _Memory, window: int, turn: int) -> Launch:
    key_dim = call.dims["K"]
    stage = 2 * _ROWS * (key_dim + _PAD) + _TRIANGLE * _TILE_BYTES + 2 * _ROWS * (_SLICE + _PAD) + 8 * _ROWS
    shared_bytes = 2 * stage + 2 * _SLICE * (key_dim + _PAD) + 2 * _SLICE * (_ROWS + _PAD)
    names = ("conv_out", "draft_rows", "recurrent_state", "committed_len", *_BATCH)
    parts = min(call.dims["B"], window) * call.dims["HV"] * (call.dims["V"] // _SLICE)
    return Launch(
        _kernel(call, "scan", SHARED_BYTES=shared_bytes),
        grid=(min(parts, call.num_sms), 1, 1),
        threads=(_SLICE // _TILE + _ROWS // _TILE) * _WARP,
        args=(
            *_operands(call, *names),
            *memory.prepared,
            call["out"],
            memory.norms,
            call.dims["B"],
            turn * window,
            window,
        ),
        shared_bytes=shared_bytes,
    )


def _finish(call: Call, memory: _Memory, window: int, turn: int, *, waits_first: bool) -> Launch:
    names = ("qkvz", "norm_weight", "committed_len", *_BATCH)
    eps = F32(call.attrs["eps"])
    return Launch(
        _kernel(call, "finish", SILU_GATE=int(call.attrs["output_gate"] == "silu")),
        grid=(call.dims["HV"], window, 1),
        threads=256,
        args=(
            *_operands(call, *names),
            memory.norms,
            call["out"],
            eps,
            call.dims["B"],
            turn * window,
            int(waits_first),
        ),
    )
