"""The gated delta rule with its gates, L2 norms and the gated RMSNorm behind it, over packed sequences."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from qwen4exp_trt.plugins.gated_delta_rule.cases import CASES
from qwen4exp_trt.plugins.gated_delta_rule.reference import reference
from qwen4exp_trt.plugins.numerics import rms_norm
from qwen4exp_trt.plugins.packed import NUM_SEQS, QUERY_START_LOC, SEQ_LENS, SLOT_IDS, PackedBatch
from qwen4exp_trt.plugins.spec import Attr, OpSpec, TensorArg

L2_EPS = 1e-6
OUTPUT_GATES = {"sigmoid": torch.sigmoid, "silu": torch.nn.functional.silu}


def l2_norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def recurrent_steps(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, query_lens: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence, all sequences at once: ``q k`` ``[B, L, HV, K]``, ``v`` ``[B, L, HV, V]``, ``g beta``
    ``[B, L, HV]``, ``state`` ``[B, HV, K, V]`` -> (outputs ``[B, L, HV, V]``, final state)."""
    outputs = torch.zeros_like(v)
    for t in range(v.shape[1]):
        active = (t < query_lens)[:, None, None, None]
        decayed = state * g[:, t, :, None, None].exp()
        read = torch.einsum("bhkv,bhk->bhv", decayed, k[:, t])
        delta = beta[:, t, :, None] * (v[:, t] - read)
        updated = decayed + k[:, t, :, :, None] * delta[:, :, None, :]
        state = torch.where(active, updated, state)
        outputs[:, t] = torch.einsum("bhkv,bhk->bhv", updated, q[:, t])
    return outputs, state


def body(
    conv_out: Tensor,
    qkvz: Tensor,
    ba: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    norm_weight: Tensor,
    recurrent_state: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    slot_ids: Tensor,
    num_seqs: Tensor,
    num_k_heads: int,
    eps: float,
    output_gate: str,
) -> Tensor:
    _, num_v_heads, key_dim, value_dim = recurrent_state.shape
    batch = PackedBatch.from_metadata(conv_out.shape[0], query_start_loc, seq_lens, num_seqs)
    q, k, v = conv_out.float().split([num_k_heads * key_dim, num_k_heads * key_dim, num_v_heads * value_dim], -1)
    b, a = ba.float().chunk(2, -1)
    g = -A_log.float().exp() * softplus(a + dt_bias.float())
    repeats = num_v_heads // num_k_heads
    q = l2_norm(q.unflatten(-1, (num_k_heads, key_dim))).repeat_interleave(repeats, 1) * key_dim**-0.5
    k = l2_norm(k.unflatten(-1, (num_k_heads, key_dim))).repeat_interleave(repeats, 1)
    q, k, v, g, beta = map(batch.pad, (q, k, v.unflatten(-1, (num_v_heads, value_dim)), g, b.sigmoid()))
    initial = batch.load_history(recurrent_state, slot_ids)
    padded, final = recurrent_steps(q, k, v, g, beta, initial, batch.query_lens)
    recurrent_state[slot_ids[: len(final)].long()] = final
    z = qkvz[:, conv_out.shape[1] :].float().unflatten(-1, (num_v_heads, value_dim))
    out = rms_norm(batch.unpad(padded), norm_weight, eps) * OUTPUT_GATES[output_gate](z)
    return out.flatten(1).to(conv_out.dtype)


SPEC = OpSpec(
    name="gated_delta_rule",
    version=1,
    inputs=(
        TensorArg("conv_out", ("T", "2*num_k_heads*K + HV*V")),  # q | k | v, heads contiguous
        TensorArg("qkvz", ("T", "2*num_k_heads*K + 2*HV*V")),  # only z, the last HV*V columns, is read
        TensorArg("ba", ("T", "2*HV")),  # b | a
        TensorArg("A_log", ("HV",)),
        TensorArg("dt_bias", ("HV",)),
        TensorArg("norm_weight", ("V",)),
        TensorArg("recurrent_state", ("S", "HV", "K", "V"), "float32", mutated=True),
        QUERY_START_LOC,
        SEQ_LENS,
        SLOT_IDS,
        NUM_SEQS,
    ),
    outputs=(TensorArg("out", ("T", "HV*V")),),
    attrs=(Attr("num_k_heads", "int"), Attr("eps", "float"), Attr("output_gate", "str")),
    body=body,
    reference=reference,
    cases=CASES,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 3e-3},
)
