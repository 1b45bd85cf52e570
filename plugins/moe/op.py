"""Mixture of experts with 16-bit weights: router, top-k experts, shared expert and their combine."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from qwen4exp_trt.plugins.moe.cases import CASES
from qwen4exp_trt.plugins.moe.reference import reference
from qwen4exp_trt.plugins.packed import NUM_SEQS
from qwen4exp_trt.plugins.spec import Attr, OpSpec, TensorArg


def route(x: Tensor, router_weight: Tensor, top_k: int, norm_topk_prob: bool) -> tuple[Tensor, Tensor]:
    """Expert weights (float32) and ids of each token, both ``[T, top_k]``. Ties go to the lower expert."""
    probabilities = (x.float() @ router_weight.float().T).softmax(-1)
    weights, experts = (out[:, :top_k] for out in probabilities.sort(dim=-1, descending=True, stable=True))
    return (weights / weights.sum(-1, keepdim=True) if norm_topk_prob else weights), experts


def gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """``down(silu(gate x) * up x)`` accumulated in float32; the hidden vector is rounded to the dtype of ``x``."""
    gate, up = (x.float() @ gate_up.float().T).chunk(2, -1)
    return (silu(gate) * up).to(x.dtype).float() @ down.float().T


def body(
    x: Tensor,
    router_weight: Tensor,
    gate_up_proj: Tensor,
    down_proj: Tensor,
    shared_gate_up_proj: Tensor,
    shared_down_proj: Tensor,
    shared_expert_gate: Tensor,
    query_start_loc: Tensor,
    num_seqs: Tensor,
    num_experts_per_tok: int,
    norm_topk_prob: int,
) -> Tensor:
    num_rows, x = x.shape[0], x[: int(query_start_loc[int(num_seqs)])]
    weights, experts = route(x, router_weight, num_experts_per_tok, bool(norm_topk_prob))
    shared_gate = (x.float() @ shared_expert_gate.float().T).sigmoid()
    out = shared_gate * gated_mlp(x, shared_gate_up_proj, shared_down_proj)
    for expert in experts.unique().tolist():
        token, choice = (experts == expert).nonzero(as_tuple=True)
        part = gated_mlp(x[token], gate_up_proj[expert], down_proj[expert])
        out.index_add_(0, token, part * weights[token, choice, None])
    return pad(out.to(x.dtype), (0, 0, 0, num_rows - len(x)))


SPEC = OpSpec(
    name="moe",
    version=1,
    inputs=(
        TensorArg("x", ("T", "H")),
        TensorArg("router_weight", ("E", "H")),
        TensorArg("gate_up_proj", ("E", "2*I", "H")),
        TensorArg("down_proj", ("E", "H", "I")),
        TensorArg("shared_gate_up_proj", ("2*IS", "H")),
        TensorArg("shared_down_proj", ("H", "IS")),
        TensorArg("shared_expert_gate", (1, "H")),
        TensorArg("query_start_loc", ("BP",), "int32"),
        NUM_SEQS,
    ),
    outputs=(TensorArg("out", ("T", "H")),),
    attrs=(Attr("num_experts_per_tok", "int"), Attr("norm_topk_prob", "int")),
    body=body,
    reference=reference,
    cases=CASES,
    tolerance={torch.float32: 1e-5, torch.bfloat16: 5e-3},
)
