"""Row ids of the n-gram table: int64 hashes of the last tokens of each sequence."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.cost import CostCall, Work, ring_bytes
from qwen4exp_trt.plugins.packed import NUM_SEQS, QUERY_START_LOC, SEQ_LENS, SLOT_IDS, PackedBatch
from qwen4exp_trt.plugins.ple_hash.cases import CASES
from qwen4exp_trt.plugins.ple_hash.launch import launches
from qwen4exp_trt.plugins.ple_hash.reference import reference
from qwen4exp_trt.plugins.spec import Attr, OpSpec, TensorArg


def body(
    input_ids: Tensor,
    ngram_ids: Tensor,
    multipliers: Tensor,
    head_sizes: Tensor,
    head_offsets: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_ids: Tensor,
    num_seqs: Tensor,
    eos_token_id: int,
) -> Tensor:
    batch = PackedBatch.from_metadata(input_ids.shape[0], query_start_loc, seq_lens, num_seqs)
    ngram_size, sequence, offset = len(multipliers), batch.seq_of_token, batch.offset_of_token
    history = batch.load_ring(ngram_ids, slot_ids, ngram_size - 1, init=eos_token_id).long()
    batch.store_ring(ngram_ids, slot_ids, input_ids)
    ids = input_ids[: batch.num_tokens].long()
    heads_per_ngram = len(head_sizes) // (ngram_size - 1)
    mixed = ids * multipliers[0]
    cut = torch.zeros_like(mixed, dtype=torch.bool)
    hashes = []
    for age in range(1, ngram_size):
        before = history[sequence, (ngram_size - 1 + offset - age).clamp_max(ngram_size - 2)]
        predecessor = torch.where(offset < age, before, ids.roll(age))
        cut = cut | (predecessor == eos_token_id)
        mixed = mixed ^ (torch.where(cut, eos_token_id, predecessor) * multipliers[age])
        hashes.append(mixed[:, None].expand(-1, heads_per_ngram))
    rows = ids.new_zeros(batch.num_rows, len(head_sizes))
    rows[: batch.num_tokens] = torch.cat(hashes, -1).remainder(head_sizes) + head_offsets
    return rows


def cost(call: CostCall) -> Work:
    dims, state_bytes = call.dims, call.num_bytes["ngram_ids"]
    state = ring_bytes(call.size, state_bytes // (dims["S"] * dims["RI"]), dims["RI"], rows_read=dims["NG"] - 1)
    return Work(moved={"ngram_ids": state})


SPEC = OpSpec(
    name="ple_hash",
    version=1,
    inputs=(
        TensorArg("input_ids", ("T",), "int32"),
        TensorArg("ngram_ids", ("S", "RI"), "int32", mutated=True),
        TensorArg("multipliers", ("NG",), "int64"),  # multipliers[0] pairs with the current token
        TensorArg("head_sizes", ("P",), "int64"),
        TensorArg("head_offsets", ("P",), "int64"),
        QUERY_START_LOC,
        SEQ_LENS,
        SLOT_IDS,
        NUM_SEQS,
    ),
    outputs=(TensorArg("rows", ("T", "P"), "int64"),),
    attrs=(Attr("eos_token_id", "int"),),
    body=body,
    reference=reference,
    cases=CASES,
    launches=launches,
    cost=cost,
    tolerance={},
)
