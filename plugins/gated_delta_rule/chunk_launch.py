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
_PART_BYTES = 48
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
    rows = call.scratch(_most_chunks(call), 4, dtype=torch.int32)
    return list(_turns(call, memories, rows)) if dims["T"] >= _least_rows(call, dims["B"]) else []


def _least_rows(call: Call, sequences: int) -> int:
    return call.dims["R"] // 2 * sequences + _ROWS


def _turn_sizes(call: Call) -> list[int]:
    """Chunks of each turn: a short first one, for which the scan has to wait, then about `_target` each."""
    first = min(_target(call) // 2, _most_chunks(call))
    rest = _most_chunks(call) - first
    turns = -(-rest // -(-rest // max(round(rest / _target(call)), 1))) if rest else 0
    return [first, *(rest * (turn + 1) // turns - rest * turn // turns for turn in range(turns))]


def _target(call: Call) -> int:
    """So many that what the kernels hand to each other stays in the L2 cache: 6 on a GB10, 45 on an H200, not more."""
    return min(max(call.num_sms**2 // 384, 2), 45)


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
        # A turn has up to half as many more than it should. Not of `_turn_sizes`, which fall now and then.
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


@dataclass(frozen=True)
class _Turn:
    memory: _Memory
    rows: ScratchRef
    """Which rows every chunk of the step has, 16 bytes each: `ChunkRows`."""
    first: int
    chunks: int


def _turns(call: Call, memories: tuple[_Memory, _Memory], rows: ScratchRef) -> Iterator[Launch]:
    """Turn by turn. While one is scanned, the next is prepared, and the one before it finished, in other memory.

    So that launches may overlap, none waits for the one before it but the scans and the last. The others read nothing
    but what was there before the op, and what a launch left that the scan in front of them has waited for; and a block
    of each sees to it that it does not end before the launch in front of it.
    """
    sizes = _turn_sizes(call)
    turns = [_Turn(memories[i % 2], rows, sum(sizes[:i]), size) for i, size in enumerate(sizes)]
    for i, turn in enumerate(turns):
        yield _prepare(call, turn)
        if i > 1:
            yield _finish(call, turns[i - 2], waits_first=False)
        yield _scan(call, turn)
    if len(turns) > 1:
        yield _finish(call, turns[-2], waits_first=False)
    yield _finish(call, turns[-1], waits_first=True)


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


def _prepare(call: Call, turn: _Turn) -> Launch:
    key_dim, k_heads = call.dims["K"], call.attrs["num_k_heads"]
    repeats = call.dims["HV"] // k_heads
    tiles = _ROWS // _TILE
    rows_bytes = 2 * _ROWS * 2 * (key_dim + _PAD)
    tiles_bytes = (_TRIANGLE - tiles) * _TILE_BYTES + tiles * _TILE * (4 * (_TILE + 4) + 2 * (_TILE + _PAD))
    shared_bytes = max(rows_bytes, repeats * tiles_bytes) + 16 * repeats * _ROWS
    names = ("conv_out", "ba", "A_log", "dt_bias", "draft_rows", "committed_len", *_BATCH)
    # A multiprocessor of a GB10 has shared memory for two blocks, which may have more registers then.
    together = 3 if call.num_sms > 100 else 2
    # Behind the first turn a scan leaves some multiprocessors free. If all blocks begin at once, so does the launch
    # behind this one, which finds room beside the scan.
    free = call.num_sms - _scan_blocks(call, turn)
    sms = free if turn.first > 0 and free > 0 else call.num_sms
    units = k_heads * turn.chunks
    return Launch(
        _kernel(call, "prepare", SHARED_BYTES=shared_bytes, MIN_BLOCKS=together),
        grid=(min(units, together * sms), 1, 1),
        threads=_TRIANGLE * _WARP,
        args=(*_operands(call, *names), *turn.memory.prepared, turn.rows, call.dims["B"], turn.first, units),
        shared_bytes=shared_bytes,
    )


def _scan_blocks(call: Call, turn: _Turn) -> int:
    parts = min(call.dims["B"], turn.chunks) * call.dims["HV"] * (call.dims["V"] // _SLICE)
    return min(parts, call.num_sms)


def _scan(call: Call, turn: _Turn) -> Launch:
    key_dim = call.dims["K"]
    stage = 2 * _ROWS * (key_dim + _PAD) + _TRIANGLE * _TILE_BYTES + 2 * _ROWS * (_SLICE + _PAD) + 8 * _ROWS
    shared_bytes = 2 * stage + 2 * _SLICE * (key_dim + _PAD) + 2 * _SLICE * (_ROWS + _PAD) + _PART_BYTES
    names = ("conv_out", "draft_rows", "recurrent_state", "committed_len", *_BATCH)
    return Launch(
        _kernel(call, "scan", SHARED_BYTES=shared_bytes),
        grid=(_scan_blocks(call, turn), 1, 1),
        threads=(_SLICE // _TILE + _ROWS // _TILE) * _WARP,
        args=(
            *_operands(call, *names),
            *turn.memory.prepared,
            call["out"],
            turn.memory.norms,
            call.dims["B"],
            turn.first,
            turn.chunks,
        ),
        shared_bytes=shared_bytes,
    )


def _finish(call: Call, turn: _Turn, *, waits_first: bool) -> Launch:
    eps = F32(call.attrs["eps"])
    return Launch(
        _kernel(call, "finish", SILU_GATE=int(call.attrs["output_gate"] == "silu")),
        grid=(call.attrs["num_k_heads"], turn.chunks, 1),
        threads=256,
        args=(
            *_operands(call, "qkvz", "norm_weight"),
            turn.rows,
            turn.memory.norms,
            call["out"],
            eps,
            turn.first,
            int(waits_first),
        ),
    )
