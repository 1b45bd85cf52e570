"""Attention of each query token over its selected groups and the open tail of its sequence, in a paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen4exp_trt.plugins.cost import CostCall, Work, attended_tokens, moved_kv_tokens, selected_tokens
from qwen4exp_trt.plugins.number_formats import e4m3_from_float, float_from_e4m3
from qwen4exp_trt.plugins.numerics import gather_pages, rms_norm, rotary_angles, rotate
from qwen4exp_trt.plugins.packed import BLOCK_TABLE, NUM_SEQS, QUERY_START_LOC, SEQ_LENS, PackedBatch
from qwen4exp_trt.plugins.qsa_attention.cases import CASES
from qwen4exp_trt.plugins.qsa_attention.launch import launches
from qwen4exp_trt.plugins.qsa_attention.reference import reference
from qwen4exp_trt.plugins.spec import Attr, OpSpec, TensorArg

QUERY_TILE = 128


def store_kv(batch: PackedBatch, k: Tensor, v: Tensor, kv_cache: Tensor, block_table: Tensor) -> None:
    """Write ``k v`` ``[T, HKV, D]`` of the new tokens to their places in the paged cache ``[NB, 2, P, HKV, D]``.

    They are rounded to its dtype, once if they are float32, and FP8 saturates.
    """
    position, block_size = batch.position_of_token, kv_cache.shape[2]
    block = block_table[batch.seq_of_token, position // block_size].long()
    for which, rows in enumerate((k, v)):
        rows = rows[: batch.num_tokens]
        kv_cache[block, which, position % block_size] = (
            e4m3_from_float(rows) if kv_cache.dtype == torch.float8_e4m3fn else rows.to(kv_cache.dtype)
        )


def load_kv(kv_cache: Tensor, which: int, block_table: Tensor, count: int, num_keys: int) -> Tensor:
    """Keys (``which`` 0) or values (1) of the first ``count`` sequences: float32 ``[count, num_keys, HKV, D]``."""
    rows = gather_pages(kv_cache[:, which], block_table, count)[:, :num_keys]
    return float_from_e4m3(rows) if rows.dtype == torch.float8_e4m3fn else rows.float()


def selection_mask(selected: Tensor, positions: Tensor, num_keys: int, compress_ratio: int) -> Tensor:
    """Keys that each query may read: ``selected`` ``[B, L, G]``, ``positions`` ``[B, L]`` -> bool ``[B, L, num_keys]``.

    A query at position p reads the keys of its selected groups and the tail, keys from the last complete group on.
    """
    num_groups = -(-num_keys // compress_ratio)
    chosen = torch.zeros(*selected.shape[:2], num_groups + 1, dtype=torch.bool)
    chosen.scatter_(-1, selected.long().masked_fill(selected < 0, num_groups), True)
    by_key = chosen[..., :num_groups].repeat_interleave(compress_ratio, -1)[..., :num_keys]
    tail = torch.arange(num_keys) >= ((positions + 1) // compress_ratio * compress_ratio)[..., None]
    return by_key | tail


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Softmax attention in float32: ``q`` ``[B, L, HQ, D]``, ``k v`` ``[B, N, HKV, D]``, ``mask`` ``[B, L, N]``."""
    grouped = q.unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("blhgd,bnhd->bhgln", grouped, k) * q.shape[-1] ** -0.5
    probabilities = scores.masked_fill(~mask[:, None, None], -torch.inf).softmax(-1)
    return torch.einsum("bhgln,bnhd->blhgd", probabilities, v).flatten(2)


def body(
    qkv: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    selected_groups: Tensor,
    kv_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_seqs: Tensor,
    num_heads: int,
    mrope_section: Sequence[int],
    compress_ratio: int,
    eps: float,
) -> Tensor:
    num_kv_heads, head_dim = kv_cache.shape[-2:]
    batch = PackedBatch.from_metadata(qkv.shape[0], query_start_loc, seq_lens, num_seqs)
    kv_width = num_kv_heads * head_dim
    q_gate, k, v = qkv.split([2 * num_heads * head_dim, kv_width, kv_width], -1)
    q, gate = q_gate.unflatten(-1, (num_heads, 2, head_dim)).unbind(2)
    angles = rotary_angles(positions, inv_freq, mrope_section)[:, None]
    q = rotate(rms_norm(q, q_gain, eps), angles).to(qkv.dtype)
    k = rotate(rms_norm(k.unflatten(-1, (num_kv_heads, head_dim)), k_gain, eps), angles)
    store_kv(batch, k, v.unflatten(-1, (num_kv_heads, head_dim)), kv_cache, block_table)
    out = batch.unpad(_attend_padded(batch, batch.pad(q), selected_groups, kv_cache, block_table, compress_ratio))
    return (out * gate.flatten(1).float().sigmoid()).to(qkv.dtype)


def _attend_padded(
    batch: PackedBatch, q: Tensor, selected: Tensor, kv_cache: Tensor, block_table: Tensor, compress_ratio: int
) -> Tensor:
    """Attention in tiles of queries, so that no score matrix of the whole prompt exists: float32 ``[B, L, HQ*D]``."""
    seq_lens = batch.context_lens + batch.query_lens
    num_keys = int(seq_lens.max()) if len(seq_lens) else 0
    count = len(seq_lens)
    k, v = (load_kv(kv_cache, which, block_table, count, num_keys) for which in (0, 1))
    key_index = torch.arange(num_keys)
    # Pages hold whatever an earlier owner left behind the last token; a NaN there must not spread through 0 * NaN.
    unused = (key_index >= seq_lens[:, None])[..., None, None]
    k, v = k.masked_fill(unused, 0.0), v.masked_fill(unused, 0.0)
    query_positions = batch.context_lens[:, None] + torch.arange(batch.max_query_len)
    padded_selection = batch.pad(selected) if compress_ratio else None
    tiles = [torch.zeros(count, 0, q.shape[2] * q.shape[3])]
    for start in range(0, batch.max_query_len, QUERY_TILE):
        tile = slice(start, start + QUERY_TILE)
        mask = key_index <= query_positions[:, tile, None]
        if padded_selection is not None:
            mask &= selection_mask(padded_selection[:, tile], query_positions[:, tile], num_keys, compress_ratio)
        mask |= (query_positions[:, tile] >= seq_lens[:, None])[..., None]  # rows of padding: any finite value
        tiles.append(attend(q[:, tile].float(), k, v, mask))
    return torch.cat(tiles, 1)


def cost(call: CostCall) -> Work:
    dims, size, ratio = call.dims, call.size, call.attrs["compress_ratio"]
    most = selected_tokens(dims["G"], ratio)
    token_bytes = call.num_bytes["kv_cache"] // (dims["NB"] * dims["P"])
    flops = 4 * size.num_seqs * attended_tokens(size, most) * dims["num_heads"] * dims["D"]
    return Work(flops, {"kv_cache": token_bytes * moved_kv_tokens(size, most)})


SPEC = OpSpec(
    name="qsa_attention",
    version=1,
    inputs=(
        TensorArg("qkv", ("T", "2*num_heads*D + 2*HKV*D")),  # per query head D query then D gate columns | k | v
        TensorArg("q_gain", ("D",), "float32"),
        TensorArg("k_gain", ("D",), "float32"),
        TensorArg("positions", (3, "T"), "int32"),
        TensorArg("inv_freq", ("R",), "float32"),
        TensorArg("selected_groups", ("TS", "G"), "int32"),  # TS = T; not read when compress_ratio is 0 (dense)
        TensorArg("kv_cache", ("NB", 2, "P", "HKV", "D"), "activation or float8_e4m3fn", mutated=True),
        QUERY_START_LOC,
        SEQ_LENS,
        BLOCK_TABLE,
        NUM_SEQS,
    ),
    outputs=(TensorArg("out", ("T", "num_heads*D")),),
    attrs=(
        Attr("num_heads", "int"),
        Attr("mrope_section", "int[]"),
        Attr("compress_ratio", "int"),
        Attr("eps", "float"),
    ),
    body=body,
    reference=reference,
    cases=CASES,
    launches=launches,
    cost=cost,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 8e-3},
)
