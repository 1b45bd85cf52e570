"""Launches the gated delta rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import (
    F32,
    MAX_SHARED_BYTES,
    NUM_SEMAPHORES,
    Call,
    Kernel,
    Launch,
    SemaphoreRef,
    c_type,
)


@dataclass(frozen=True)
class Geometry:
    """Of a kernel: blocks for a head, each with some of its columns; rows of the state that a thread has; threads of a
    multiprocessor for which registers are to suffice."""

    slices: int
    rows: int
    max_threads: int


MANY, FEW = Geometry(slices=1, rows=16, max_threads=512), Geometry(slices=4, rows=8, max_threads=512)
FEW_SEQUENCES, FEW_TOKENS = 2, 16
"""`FEW` is for at most so many sequences and tokens."""

_CHUNK, _WARP, _ROW_LANES = 8, 32, 4
_OPERANDS = ("conv_out", "qkvz", "ba", "A_log", "dt_bias", "norm_weight")
_STATES = ("recurrent_state", "draft_rows", "committed_len")
_BATCH = ("query_start_loc", "seq_lens", "slot_ids", "num_seqs", "out")


def launches(call: Call) -> Iterator[Launch]:
    heads, key_dim, value_dim, ring = (call.dims[name] for name in ("HV", "K", "V", "R"))
    geometry = _geometry(call)
    row_groups = -(-key_dim // (geometry.rows * _ROW_LANES))
    column_groups = -(-value_dim // geometry.slices // _WARP)
    threads = row_groups * column_groups * _WARP
    shared_bytes = _shared_bytes(row_groups * geometry.rows * _ROW_LANES, row_groups, column_groups, value_dim)
    _check(call, threads, shared_bytes)
    defines = (
        ("K_HEADS", call.attrs["num_k_heads"]),
        ("V_HEADS", heads),
        ("KEY_DIM", key_dim),
        ("VALUE_DIM", value_dim),
        ("DRAFTS", ring // 2),
        ("SILU_GATE", int(call.attrs["output_gate"] == "silu")),
        ("PART", 4 if heads % 2 == 0 else 2),
        ("SLICES", geometry.slices),
        ("ROWS", geometry.rows),
        ("MIN_BLOCKS", max(geometry.max_threads // threads, 1)),
        ("SHARED_BYTES", shared_bytes),
        ("ACTIVATION", c_type(call["conv_out"].dtype)),
    )
    slices = call.scratch(FEW_TOKENS, heads * value_dim)
    yield Launch(
        Kernel("gated_delta_rule/kernel.cu", "gated_delta_rule", defines),
        grid=(heads * geometry.slices, call.dims["B"] if call.dims["T"] else 0, 1),
        threads=threads,
        args=(
            *(call[name] for name in (*_OPERANDS, *_STATES, *_BATCH)),
            slices,
            SemaphoreRef(),
            F32(call.attrs["eps"]),
        ),
        shared_bytes=shared_bytes,
    )


def _geometry(call: Call) -> Geometry:
    sequences, tokens = call.dims["B"], call.dims["T"]
    is_few = sequences <= FEW_SEQUENCES and tokens <= FEW_TOKENS and sequences * call.dims["HV"] <= NUM_SEMAPHORES
    return FEW if is_few and call.dims["V"] % (FEW.slices * _WARP) == 0 else MANY


def _shared_bytes(keys: int, row_groups: int, column_groups: int, value_dim: int) -> int:
    """Of the kernel's ``Shared``."""
    values = column_groups * _WARP
    row = 2 * keys + 2 * values + 2 * row_groups * values + 2 * _CHUNK + 2
    return 4 * (_CHUNK * row + value_dim + 4)


def _check(call: Call, threads: int, shared_bytes: int) -> None:
    heads, key_dim, value_dim, ring = (call.dims[name] for name in ("HV", "K", "V", "R"))
    num_k_heads, gate = call.attrs["num_k_heads"], call.attrs["output_gate"]
    if (
        heads % num_k_heads
        or key_dim % 4
        or value_dim % 4
        or threads > MANY.max_threads
        or shared_bytes > MAX_SHARED_BYTES
    ):
        raise PluginError(
            f"gated_delta_rule: {num_k_heads} key heads of {key_dim} and {heads} value heads of {value_dim}; the "
            "kernel takes value heads in a multiple of the key heads, of dims that 4 divides, whose state "
            f"has at most {MANY.max_threads * MANY.rows * 4} elements"
        )
    if ring % 2 or not 2 <= ring <= 2 * _CHUNK:
        raise PluginError(f"gated_delta_rule: a ring of {ring} draft rows, expected an even number up to {2 * _CHUNK}")
    if gate not in ("sigmoid", "silu"):
        raise PluginError(f"gated_delta_rule: output gate {gate!r}, expected sigmoid or silu")
