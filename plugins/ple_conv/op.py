"""Adds the n-gram embedding to the residual stack: gate per stream, then a dilated causal convolution."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from qwen4exp_trt.plugins.cost import CostCall, Work, ring_bytes
from qwen4exp_trt.plugins.numerics import dilated_causal_conv, grouped_rms_norm
from qwen4exp_trt.plugins.packed import NUM_SEQS, QUERY_START_LOC, SEQ_LENS, SLOT_IDS, PackedBatch
from qwen4exp_trt.plugins.ple_conv.cases import CASES
from qwen4exp_trt.plugins.ple_conv.launch import launches
from qwen4exp_trt.plugins.ple_conv.reference import reference
from qwen4exp_trt.plugins.spec import Attr, OpSpec, TensorArg

GATE_FLOOR = 1e-6


def stream_gates(stack: Tensor, key: Tensor, key_gain: Tensor, query_gain: Tensor, hc_count: int, eps: float) -> Tensor:
    """Sigmoid of the signed root of the scaled key-query product of each stream, float32 ``[T, HC, 1]``."""
    k = grouped_rms_norm(key, key_gain, hc_count, eps).unflatten(1, (hc_count, -1))
    q = grouped_rms_norm(stack, query_gain, hc_count, eps).unflatten(1, (hc_count, -1))
    score = (k * q).sum(-1, keepdim=True) * k.shape[-1] ** -0.5
    return torch.sigmoid(score.sign() * score.abs().clamp_min(GATE_FLOOR).sqrt())


def body(
    stack: Tensor,
    key: Tensor,
    value: Tensor,
    key_gain: Tensor,
    query_gain: Tensor,
    conv_gain: Tensor,
    conv_weight: Tensor,
    ple_conv_state: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_ids: Tensor,
    num_seqs: Tensor,
    dilation: int,
    eps: float,
) -> Tensor:
    hc_count = stack.shape[1] // value.shape[1]
    batch = PackedBatch.from_metadata(stack.shape[0], query_start_loc, seq_lens, num_seqs)
    gated = (stream_gates(stack, key, key_gain, query_gain, hc_count, eps) * value.float()[:, None]).flatten(1)
    normed = grouped_rms_norm(gated, conv_gain, hc_count, eps).to(stack.dtype)
    history = batch.load_ring(ple_conv_state, slot_ids, (conv_weight.shape[1] - 1) * dilation)
    extended = torch.cat([history, batch.pad(normed)], 1)
    batch.store_ring(ple_conv_state, slot_ids, normed)
    convolved = batch.unpad(silu(dilated_causal_conv(extended, conv_weight, dilation)))
    return (stack.float() + gated + convolved).to(stack.dtype)


def cost(call: CostCall) -> Work:
    """Of the rows before the step one token reads every ``dilation``-th."""
    dims, state_bytes = call.dims, call.num_bytes["ple_conv_state"]
    rows_read = (dims["KW"] - 1) * min(call.size.new_tokens, dims["dilation"])
    state = ring_bytes(call.size, state_bytes // (dims["S"] * dims["RC"]), dims["RC"], rows_read)
    return Work(moved={"ple_conv_state": state})


SPEC = OpSpec(
    name="ple_conv",
    version=1,
    inputs=(
        TensorArg("stack", ("T", "W")),
        TensorArg("key", ("T", "W")),
        TensorArg("value", ("T", "H")),
        TensorArg("key_gain", ("W",), "float32"),
        TensorArg("query_gain", ("W",), "float32"),
        TensorArg("conv_gain", ("W",), "float32"),
        TensorArg("conv_weight", ("W", "KW")),
        TensorArg("ple_conv_state", ("S", "RC", "W"), mutated=True),
        QUERY_START_LOC,
        SEQ_LENS,
        SLOT_IDS,
        NUM_SEQS,
    ),
    outputs=(TensorArg("out", ("T", "W")),),
    attrs=(Attr("dilation", "int"), Attr("eps", "float")),
    body=body,
    reference=reference,
    cases=CASES,
    launches=launches,
    cost=cost,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 5e-3},
)
