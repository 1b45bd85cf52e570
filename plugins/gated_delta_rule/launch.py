"""Launches the gated delta rule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.gated_delta_rule.chunk_launch import LONGEST, chunk_launches
from qwen4exp_trt.plugins.kernels import F32, MAX_SHARED_BYTES, Call, Kernel, Launch, c_type

_CHUNK, _WARP, _ROW_LANES, _COLUMNS = 8, 32, 4, 4
_MAX_THREADS = 512
"""Of a multiprocessor; 128 registers for each."""
_ANY = 2**30

_OPERANDS = ("conv_out", "qkvz", "ba", "A_log", "dt_bias", "norm_weight")
_STATES = ("recurrent_state", "draft_rows", "committed_len")
_BATCH = ("query_start_loc", "seq_lens", "slot_ids", "num_seqs", "out")


@dataclass(frozen=True)
class Geometry:
    """Of a block, whose threads have ``rows`` rows of 4 columns of the state."""

    rows: int
    row_groups: int
    column_groups: int

    @classmethod
    def of(cls, rows: int, key_dim: int, value_dim: int) -> Geometry:
        return cls(rows, -(-key_dim // (rows * _ROW_LANES)), -(-value_dim // _WARP))

    @property
    def threads(self) -> int:
        return self.row_groups * self.column_groups * _WARP

    @property
    def shared_bytes(self) -> int:
        """Of the kernel's ``Shared``."""
        keys, values = self.row_groups * self.rows * _ROW_LANES, self.column_groups * _WARP
        row = 2 * keys + 2 * values + 2 * self.row_groups * values + 2 * _CHUNK + 2
        return 4 * (_CHUNK * row + values)


def launches(call: Call) -> Iterator[Launch]:
    """Sequences of few rows by the recurrence; in a step of many rows, long ones by chunks."""
    by_chunks = chunk_launches(call)
    yield from _few_rows(call, LONGEST if by_chunks else _ANY)
    yield from by_chunks


def _few_rows(call: Call, longest: int) -> Iterator[Launch]:
    heads, key_dim, value_dim, ring = (call.dims[name] for name in ("HV", "K", "V", "R"))
    geometry = Geometry.of(16, key_dim, value_dim)
    _check(call, geometry)
    # The heads of one sequence are a block a multiprocessor at most; more threads get its state on the way sooner.
    larger = Geometry.of(8, key_dim, value_dim)
    is_one = call.dims["B"] == 1 and larger.threads <= _MAX_THREADS
    if is_one:
        geometry = larger
    defines = (
        ("K_HEADS", call.attrs["num_k_heads"]),
        ("V_HEADS", heads),
        ("KEY_DIM", key_dim),
        ("VALUE_DIM", value_dim),
        ("DRAFTS", ring // 2),
        ("LONGEST", longest),
        ("SILU_GATE", int(call.attrs["output_gate"] == "silu")),
        ("PART", 4 if heads % 2 == 0 else 2),
        ("ROWS", geometry.rows),
        ("IS_LONE", int(is_one and longest == _ANY)),
        ("MIN_BLOCKS", _MAX_THREADS // geometry.threads),
        ("SHARED_BYTES", geometry.shared_bytes),
        ("ACTIVATION", c_type(call["conv_out"].dtype)),
    )
    blocks = call.num_sms * (_MAX_THREADS // geometry.threads)
    operands = (call[name] for name in (*_OPERANDS, *_STATES, *_BATCH))
    yield Launch(
        Kernel("gated_delta_rule/kernel.cu", "gated_delta_rule", defines),
        grid=(heads, call.dims["B"] if call.dims["T"] else 0, 1),
        threads=geometry.threads,
        args=(*operands, F32(call.attrs["eps"]), call.dims["T"] // max(call.dims["B"], 1), blocks),
        shared_bytes=geometry.shared_bytes,
    )


def _check(call: Call, geometry: Geometry) -> None:
    heads, key_dim, value_dim, ring = (call.dims[name] for name in ("HV", "K", "V", "R"))
    num_k_heads, gate = call.attrs["num_k_heads"], call.attrs["output_gate"]
    is_possible = heads % num_k_heads == 0 and key_dim % 4 == 0 and value_dim % 4 == 0
    if not is_possible or geometry.threads > _MAX_THREADS or geometry.shared_bytes > MAX_SHARED_BYTES:
        raise PluginError(
            f"gated_delta_rule: {num_k_heads} key heads of {key_dim} and {heads} value heads of {value_dim}; the "
            "kernel takes value heads in a multiple of the key heads, of dims that 4 divides, whose state has at most "
            f"{_MAX_THREADS * geometry.rows * _COLUMNS} elements"
        )
    if ring % 2 or not 2 <= ring <= 2 * _CHUNK:
        raise PluginError(f"gated_delta_rule: a ring of {ring} draft rows, expected an even number up to {2 * _CHUNK}")
    if gate not in ("sigmoid", "silu"):
        raise PluginError(f"gated_delta_rule: output gate {gate!r}, expected sigmoid or silu")
