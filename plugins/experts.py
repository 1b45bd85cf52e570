"""What the mixture-of-experts ops share: routing, one expert, and the weighted sum."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad, silu

from qwen4exp_trt.plugins.cost import CostCall, CostFunction, Work, expected_experts
from qwen4exp_trt.plugins.dims import ceil_div, evaluate
from qwen4exp_trt.plugins.moe_launch import moe_launches
from qwen4exp_trt.plugins.number_formats import FP8_BLOCK, dequantize_fp8_blocks, dequantize_nvfp4
from qwen4exp_trt.plugins.packed import NUM_SEQS
from qwen4exp_trt.plugins.spec import Attr, Case, OpSpec, TensorArg

NVFP4_EXPERTS = (
    TensorArg("gate_up_proj", ("E", "32*IB", "16*HB"), "float4_e2m1fn_x2"),
    TensorArg("gate_up_block_scales", ("E", "32*IB", "HB"), "float8_e4m3fn"),
    TensorArg("gate_up_scales", ("E", 2), "float32"),
    TensorArg("down_proj", ("E", "16*HB", "16*IB"), "float4_e2m1fn_x2"),
    TensorArg("down_block_scales", ("E", "16*HB", "IB"), "float8_e4m3fn"),
    TensorArg("down_scales", ("E",), "float32"),
)
"""The operands of E routed experts in NVFP4: hidden size 16*HB, intermediate size 16*IB."""

FP8_EXPERTS = (
    TensorArg("gate_up_proj", ("E", "2*I", "H"), "float8_e4m3fn"),
    TensorArg("gate_up_scales", ("E", 2, ceil_div("I", FP8_BLOCK), ceil_div("H", FP8_BLOCK)), "float32"),
    TensorArg("down_proj", ("E", "H", "I"), "float8_e4m3fn"),
    TensorArg("down_scales", ("E", ceil_div("H", FP8_BLOCK), ceil_div("I", FP8_BLOCK)), "float32"),
)
"""The operands of E routed experts in FP8 with a scale for each block; gate and up have their own grids of blocks."""


def float_shared_expert(hidden: str) -> tuple[TensorArg, ...]:
    """The operands of a 16-bit shared expert; ``hidden`` is the dim of the hidden size."""
    return TensorArg("shared_gate_up_proj", ("2*IS", hidden)), TensorArg("shared_down_proj", (hidden, "IS"))


def moe_spec(
    name: str,
    hidden: str,
    experts: Sequence[TensorArg],
    shared_expert: Sequence[TensorArg],
    body: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    cases: Sequence[Case],
) -> OpSpec:
    """The spec of a mixture of experts, whose ops differ by the operands of their experts alone."""
    inputs = (
        TensorArg("x", ("T", hidden)),
        TensorArg("router_weight", ("E", hidden)),
        *experts,
        *shared_expert,
        TensorArg("shared_expert_gate", (1, hidden)),
        TensorArg("query_start_loc", ("BP",), "int32"),
        NUM_SEQS,
    )
    return OpSpec(
        name=name,
        version=1,
        inputs=inputs,
        outputs=(TensorArg("out", ("T", hidden)),),
        attrs=(Attr("num_experts_per_tok", "int"), Attr("norm_topk_prob", "int")),
        body=body,
        reference=reference,
        cases=tuple(cases),
        tolerance={torch.float32: 1e-5, torch.bfloat16: 5e-3},
        launches=moe_launches,
        cost=_cost_of(inputs, experts),
    )


def _cost_of(inputs: Sequence[TensorArg], experts: Sequence[TensorArg]) -> CostFunction:
    """Of the experts' operands those are read that the tokens are routed to, each once."""
    columns = {arg.name: arg.dims[-1] for arg in inputs}

    def cost(call: CostCall) -> Work:
        num_experts, choices, tokens = call.dims["E"], call.attrs["num_experts_per_tok"], call.dims["T"]
        distinct = call.size.distinct_experts
        if distinct is None:
            distinct = expected_experts(num_experts, choices, tokens)
        moved = {arg.name: round(call.num_bytes[arg.name] * distinct / num_experts) for arg in experts}
        hidden, inner, shared_inner = (
            evaluate(columns[name], call.dims) for name in ("x", "down_proj", "shared_down_proj")
        )
        products = num_experts + 3 * choices * inner + 3 * shared_inner + 1  # router, experts, shared expert, its gate
        return Work(2 * tokens * hidden * products, moved)

    return cost


def route(x: Tensor, router_weight: Tensor, top_k: int, norm_topk_prob: bool) -> tuple[Tensor, Tensor]:
    """Expert weights (float32) and ids of each token, both ``[T, top_k]``. Ties go to the lower expert."""
    probabilities = (x.float() @ router_weight.float().T).softmax(-1)
    weights, experts = (out[:, :top_k] for out in probabilities.sort(dim=-1, descending=True, stable=True))
    return (weights / weights.sum(-1, keepdim=True) if norm_topk_prob else weights), experts


def gated_mlp(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """``down(silu(gate x) * up x)`` accumulated in float32; the hidden vector is rounded to the dtype of ``x``."""
    gate, up = (x.float() @ gate_up.float().T).chunk(2, -1)
    return (silu(gate) * up).to(x.dtype).float() @ down.float().T


def nvfp4_gated_mlp(
    x: Tensor,
    gate_up: Tensor,
    gate_up_block_scales: Tensor,
    gate_up_scales: Tensor,
    down: Tensor,
    down_block_scales: Tensor,
    down_scale: Tensor,
) -> Tensor:
    """`gated_mlp` of one expert in NVFP4; ``gate_up_scales`` ``[2]`` are the global scales of gate and of up."""
    by_row = gate_up_scales.repeat_interleave(gate_up.shape[0] // 2)
    down_float = dequantize_nvfp4(down, down_block_scales, down_scale)
    return gated_mlp(x, dequantize_nvfp4(gate_up, gate_up_block_scales, by_row), down_float)


def fp8_gated_mlp(x: Tensor, gate_up: Tensor, gate_up_scales: Tensor, down: Tensor, down_scales: Tensor) -> Tensor:
    """`gated_mlp` of one expert in FP8; ``gate_up_scales`` ``[2, ceil(I/128), ceil(H/128)]`` are of gate and of up."""
    gate_and_up = dequantize_fp8_blocks(gate_up.unflatten(0, (2, -1)), gate_up_scales)
    return gated_mlp(x, gate_and_up.flatten(0, 1), dequantize_fp8_blocks(down, down_scales))


def mix_experts(
    x: Tensor,
    router_weight: Tensor,
    shared_expert_gate: Tensor,
    query_start_loc: Tensor,
    num_seqs: Tensor,
    top_k: int,
    norm_topk_prob: bool,
    run_expert: Callable[[int, Tensor], Tensor],
    run_shared: Callable[[Tensor], Tensor],
) -> Tensor:
    """Weighted sum of the chosen experts and of the gated shared expert, rounded once to the dtype of ``x``.

    ``run_expert(expert, rows)`` and ``run_shared(rows)`` give float32; an expert that no token chose is not run, and
    rows of padding choose none.
    """
    num_rows, x = x.shape[0], x[: int(query_start_loc[int(num_seqs)])]
    weights, experts = route(x, router_weight, top_k, norm_topk_prob)
    out = (x.float() @ shared_expert_gate.float().T).sigmoid() * run_shared(x)
    for expert in experts.unique().tolist():
        token, choice = (experts == expert).nonzero(as_tuple=True)
        out.index_add_(0, token, run_expert(expert, x[token]) * weights[token, choice, None])
    return pad(out.to(x.dtype), (0, 0, 0, num_rows - len(x)))
