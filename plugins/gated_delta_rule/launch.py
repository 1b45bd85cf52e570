"""Launches the gated delta rule."""

from __future__ import annotations

from collections.abc import Iterator

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import F32, MAX_SHARED_BYTES, Call, Kernel, Launch, c_type

ROWS = 16
"""Rows of the state that a thread has."""
MAX_THREADS = 512
"""Threads of a multiprocessor that 128 registers each leave room for."""

_CHUNK, _WARP, _ROW_LANES = 8, 32, 4
_OPERANDS = ("conv_out", "qkvz", "ba", "A_log", "dt_bias", "norm_weight")
_STATES = ("recurrent_state", "draft_rows", "committed_len")
_BATCH = ("query_start_loc", "seq_lens", "slot_ids", "num_seqs", "out")


def launches(call: Call) -> Iterator[Launch]:
    heads, key_dim, value_dim, ring = (call.dims[name] for name in ("HV", "K", "V", "R"))
    num_k_heads, gate = call.attrs["num_k_heads"], call.attrs["output_gate"]
    row_groups, column_groups = -(-key_dim // (ROWS * _ROW_LANES)), -(-value_dim // _WARP)
    threads, shared_bytes = row_groups * column_groups * _WARP, _shared_bytes(row_groups, column_groups)
    _check(call, threads, shared_bytes)
    defines = (
        ("K_HEADS", num_k_heads),
        ("V_HEADS", heads),
        ("KEY_DIM", key_dim),
        ("VALUE_DIM", value_dim),
        ("DRAFTS", ring // 2),
        ("SILU_GATE", int(gate == "silu")),
        ("PART", 4 if heads % 2 == 0 else 2),
        ("ROWS", ROWS),
        ("MIN_BLOCKS", MAX_THREADS // threads),
        ("SHARED_BYTES", shared_bytes),
        ("ACTIVATION", c_type(call["conv_out"].dtype)),
    )
    yield Launch(
        Kernel("gated_delta_rule/kernel.cu", "gated_delta_rule", defines),
        grid=(heads, call.dims["B"] if call.dims["T"] else 0, 1),
        threads=threads,
        args=(*(call[name] for name in (*_OPERANDS, *_STATES, *_BATCH)), F32(call.attrs["eps"])),
        shared_bytes=shared_bytes,
    )


def _shared_bytes(row_groups: int, column_groups: int) -> int:
    """Of the kernel's ``Shared``."""
    keys, values = row_groups * ROWS * _ROW_LANES, column_groups * _WARP
    row = 2 * keys + 2 * values + 2 * row_groups * values + 2 * _CHUNK + 2 + column_groups
    return 4 * (_CHUNK * row + values)


def _check(call: Call, threads: int, shared_bytes: int) -> None:
    heads, key_dim, value_dim, ring = (call.dims[name] for name in ("HV", "K", "V", "R"))
    num_k_heads, gate = call.attrs["num_k_heads"], call.attrs["output_gate"]
    if heads % num_k_heads or key_dim % 4 or value_dim % 4 or threads > MAX_THREADS or shared_bytes > MAX_SHARED_BYTES:
        raise PluginError(
            f"gated_delta_rule: {num_k_heads} key heads of {key_dim} and {heads} value heads of {value_dim}; the "
            "kernel takes a number of value heads that key heads divide, and heads whose dims 4 divides and whose state "
            f"has at most {MAX_THREADS * ROWS * 4} elements"
        )
    if ring % 2 or not 2 <= ring <= 2 * _CHUNK:
        raise PluginError(f"gated_delta_rule: a ring of {ring} draft rows, expected an even number up to {2 * _CHUNK}")
    if gate not in ("sigmoid", "silu"):
        raise PluginError(f"gated_delta_rule: output gate {gate!r}, expected sigmoid or silu")
