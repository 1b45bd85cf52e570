"""Scores of the complete groups and the exact top-k of them, per query token."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.cost import CostCall, Work, scored_groups, sum_of_groups
from qwen4exp_trt.plugins.numerics import gather_pages
from qwen4exp_trt.plugins.packed import BLOCK_TABLE, NUM_SEQS, QUERY_START_LOC, SEQ_LENS, PackedBatch
from qwen4exp_trt.plugins.qsa_select.cases import CASES
from qwen4exp_trt.plugins.qsa_select.launch import launches
from qwen4exp_trt.plugins.qsa_select.reference import reference
from qwen4exp_trt.plugins.spec import Attr, OpSpec, TensorArg


def select_top_groups(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """The ``count`` best of the first ``visible`` groups of each row, ascending, padded with -1.

    ``scores`` float32 ``[B, L, N]``, ``visible`` ``[B, L]`` -> int32 ``[B, L, count]``. Ties go to the lower group.
    """
    groups = scores.shape[-1]
    scores = scores.masked_fill(torch.arange(groups) >= visible[..., None], -torch.inf)
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    best = best.masked_fill(torch.arange(best.shape[-1]) >= visible[..., None], groups).sort(-1).values
    best = torch.nn.functional.pad(best, (0, count - best.shape[-1]), value=groups)
    return best.masked_fill(best == groups, -1).int()


def body(
    index_q: Tensor,
    index_k_cache: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    num_seqs: Tensor,
    budget: int,
    compress_ratio: int,
) -> Tensor:
    batch = PackedBatch.from_metadata(index_q.shape[0], query_start_loc, seq_lens, num_seqs)
    q = batch.pad(index_q).unflatten(-1, (-1, index_k_cache.shape[-1])).float()
    keys = gather_pages(index_k_cache, block_table, len(batch.query_lens)).float()
    scores = torch.zeros(*q.shape[:2], keys.shape[1])
    for head in range(q.shape[2]):
        scores += torch.relu(q[:, :, head] @ keys.mT)
    visible = (batch.context_lens[:, None] + torch.arange(q.shape[1]) + 1) // compress_ratio
    return batch.unpad(select_top_groups(scores, visible, budget // compress_ratio))


def cost(call: CostCall) -> Work:
    """All keys of each sequence. A row that sees no more groups than it selects takes them without a score."""
    dims, size = call.dims, call.size
    ratio, budget = call.attrs["compress_ratio"], call.attrs["budget"]
    key_bytes = call.num_bytes["index_k_cache"] // (dims["NB"] * dims["G"])
    first = max(size.context_len, min(budget + ratio - 1, size.seq_len))
    scores = sum_of_groups(size.seq_len, ratio) - sum_of_groups(first, ratio)
    return Work(
        2 * size.num_seqs * scores * dims["N"],
        {"index_k_cache": key_bytes * size.num_seqs * scored_groups(size, ratio, budget // ratio)},
    )


SPEC = OpSpec(
    name="qsa_select",
    version=1,
    inputs=(
        TensorArg("index_q", ("T", "N")),
        TensorArg("index_k_cache", ("NB", "G", "D")),
        QUERY_START_LOC,
        SEQ_LENS,
        BLOCK_TABLE,
        NUM_SEQS,
    ),
    outputs=(TensorArg("selected_groups", ("T", "budget // compress_ratio"), "int32"),),
    attrs=(Attr("budget", "int"), Attr("compress_ratio", "int")),
    body=body,
    reference=reference,
    cases=CASES,
    launches=launches,
    cost=cost,
    tolerance={torch.float32: 0.0, torch.bfloat16: 0.0},
)
