"""Index queries, and the compressed index key of every group of tokens that this step completes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen4exp_trt.plugins.cost import CostCall, Work, completed_groups, ring_bytes
from qwen4exp_trt.plugins.numerics import rms_norm, rotary_angles, rotate
from qwen4exp_trt.plugins.packed import BLOCK_TABLE, NUM_SEQS, QUERY_START_LOC, SEQ_LENS, SLOT_IDS, PackedBatch
from qwen4exp_trt.plugins.qsa_indexer.cases import CASES
from qwen4exp_trt.plugins.qsa_indexer.launch import launches
from qwen4exp_trt.plugins.qsa_indexer.reference import reference
from qwen4exp_trt.plugins.spec import Attr, OpSpec, TensorArg


def store_group_keys(
    batch: PackedBatch, keys: Tensor, index_k_cache: Tensor, block_table: Tensor, compress_ratio: int
) -> None:
    """Write the keys ``[B, L, D]``, one per token, of the tokens that complete a group into the paged cache."""
    position = batch.position_of_token
    last = (position + 1) % compress_ratio == 0
    group, seq = position[last] // compress_ratio, batch.seq_of_token[last]
    per_block = index_k_cache.shape[1]
    block = block_table[seq, group // per_block].long()
    index_k_cache[block, group % per_block] = keys[seq, batch.offset_of_token[last]].to(index_k_cache.dtype)


def body(
    index_qk: Tensor,
    q_gain: Tensor,
    k_gain: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    index_k_cache: Tensor,
    index_k_ring: Tensor,
    index_position_ring: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_ids: Tensor,
    block_table: Tensor,
    num_seqs: Tensor,
    mrope_section: Sequence[int],
    compress_ratio: int,
    eps: float,
) -> Tensor:
    batch = PackedBatch.from_metadata(index_qk.shape[0], query_start_loc, seq_lens, num_seqs)
    index_q, index_k = index_qk[:, : -len(k_gain)], index_qk[:, -len(k_gain) :]
    token_positions = positions.T.contiguous()
    extended = torch.cat([batch.load_ring(index_k_ring, slot_ids, compress_ratio - 1), batch.pad(index_k)], 1)
    extended_positions = torch.cat(
        [batch.load_ring(index_position_ring, slot_ids, compress_ratio - 1), batch.pad(token_positions)], 1
    )
    windows = extended.float().unfold(1, compress_ratio, 1)
    pooled = windows.mean(-1).to(index_qk.dtype)
    first_positions = extended_positions[:, : batch.max_query_len].movedim(-1, 0)
    angles = rotary_angles(first_positions, inv_freq, mrope_section)
    keys = rotate(rms_norm(pooled, k_gain, eps), angles)
    store_group_keys(batch, keys, index_k_cache, block_table, compress_ratio)
    batch.store_ring(index_k_ring, slot_ids, index_k)
    batch.store_ring(index_position_ring, slot_ids, token_positions)
    heads = rms_norm(index_q.unflatten(-1, (-1, len(q_gain))), q_gain, eps)
    angles = rotary_angles(positions, inv_freq, mrope_section)
    return rotate(heads, angles[:, None]).flatten(1).to(index_qk.dtype)


def cost(call: CostCall) -> Work:
    """A key is written for each group that the step completes; rings hold the raw keys of the open one."""
    dims, size, ratio = call.dims, call.size, call.attrs["compress_ratio"]
    rings = {
        ring: ring_bytes(size, call.num_bytes[ring] // (dims["S"] * dims["RS"]), dims["RS"], rows_read=ratio - 1)
        for ring in ("index_k_ring", "index_position_ring")
    }
    key_bytes = call.num_bytes["index_k_cache"] // (dims["NB"] * dims["G"])
    return Work(moved=rings | {"index_k_cache": key_bytes * completed_groups(size, ratio)})


SPEC = OpSpec(
    name="qsa_indexer",
    version=1,
    inputs=(
        TensorArg("index_qk", ("T", "N")),  # index query heads | index key
        TensorArg("q_gain", ("D",), "float32"),
        TensorArg("k_gain", ("D",), "float32"),
        TensorArg("positions", (3, "T"), "int32"),
        TensorArg("inv_freq", ("R",), "float32"),
        TensorArg("index_k_cache", ("NB", "G", "D"), mutated=True),
        TensorArg("index_k_ring", ("S", "RS", "D"), mutated=True),
        TensorArg("index_position_ring", ("S", "RS", 3), "int32", mutated=True),
        QUERY_START_LOC,
        SEQ_LENS,
        SLOT_IDS,
        BLOCK_TABLE,
        NUM_SEQS,
    ),
    outputs=(TensorArg("index_q", ("T", "N - D")),),
    attrs=(Attr("mrope_section", "int[]"), Attr("compress_ratio", "int"), Attr("eps", "float")),
    body=body,
    reference=reference,
    cases=CASES,
    launches=launches,
    cost=cost,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 6e-3},
)
