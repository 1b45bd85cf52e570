"""Depthwise causal convolution with SiLU over packed sequences, with a ring of the last inputs as state."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from qwen4exp_trt.plugins.causal_conv1d.cases import CASES
from qwen4exp_trt.plugins.causal_conv1d.launch import launches
from qwen4exp_trt.plugins.causal_conv1d.reference import reference
from qwen4exp_trt.plugins.cost import CostCall, Work, ring_bytes
from qwen4exp_trt.plugins.numerics import dilated_causal_conv
from qwen4exp_trt.plugins.packed import NUM_SEQS, QUERY_START_LOC, SEQ_LENS, SLOT_IDS, PackedBatch
from qwen4exp_trt.plugins.spec import OpSpec, TensorArg


def body(
    x: Tensor,
    weight: Tensor,
    conv_state: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_ids: Tensor,
    num_seqs: Tensor,
) -> Tensor:
    batch = PackedBatch.from_metadata(x.shape[0], query_start_loc, seq_lens, num_seqs)
    channels, kernel_size = weight.shape
    history = batch.load_ring(conv_state, slot_ids, kernel_size - 1)
    extended = torch.cat([history, batch.pad(x[:, :channels])], 1)
    batch.store_ring(conv_state, slot_ids, x[:, :channels])
    return batch.unpad(silu(dilated_causal_conv(extended, weight, dilation=1)).to(x.dtype))


def cost(call: CostCall) -> Work:
    dims, state_bytes = call.dims, call.num_bytes["conv_state"]
    state = ring_bytes(call.size, state_bytes // (dims["S"] * dims["RS"]), dims["RS"], rows_read=dims["KW"] - 1)
    return Work(moved={"x": call.num_bytes["x"] * dims["C"] // dims["N"], "conv_state": state})


SPEC = OpSpec(
    name="causal_conv1d",
    version=1,
    inputs=(
        TensorArg("x", ("T", "N")),  # the first C columns are convolved
        TensorArg("weight", ("C", "KW")),
        TensorArg("conv_state", ("S", "RS", "C"), mutated=True),  # the token at position p has row p % RS
        QUERY_START_LOC,
        SEQ_LENS,
        SLOT_IDS,
        NUM_SEQS,
    ),
    outputs=(TensorArg("out", ("T", "C")),),
    attrs=(),
    body=body,
    reference=reference,
    cases=CASES,
    launches=launches,
    cost=cost,
    tolerance={torch.float32: 1e-6, torch.bfloat16: 3e-3},
)
