"""The mixtures of experts on a GPU at released sizes, against their bodies in float32 on the GPU."""

from __future__ import annotations

import pytest
import torch
from moe_checks import check_on_gpu, released_batch, released_weights, run_on_gpu
from moe_operands import MOE_OPS, moe_operands
from op_checks import equal_bits

from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.sample_experts import MoeSizes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", [1, 2, 8, 64, 512])
@pytest.mark.parametrize("op", MOE_OPS)
def test_released_sizes(op: str, tokens: int) -> None:
    """All rows of a decode step that are real, and a step with rows of padding."""
    check_on_gpu(op, released_weights(op) | released_batch(tokens, padding_rows=0, seed=tokens), tokens)
    if tokens > 1:
        check_on_gpu(op, released_weights(op) | released_batch(tokens - 1, padding_rows=3, seed=tokens + 1), tokens - 1)


@pytest.mark.parametrize("op", ["nvfp4_moe", "nvfp4_routed_moe"])
def test_a_prompt(op: str) -> None:
    check_on_gpu(op, released_weights(op) | released_batch(1300, padding_rows=0, seed=3), 1300)


@pytest.mark.parametrize("tokens", [1, 21, 100])
def test_many_tokens_of_few_experts(tokens: int) -> None:
    """Every expert has more tokens than a group takes; raw probabilities."""
    sizes = MoeSizes(hidden=1280, inner=384, shared_inner=256, experts=24, choices=7)
    check_on_gpu("nvfp4_moe", moe_operands("nvfp4_moe", sizes, [tokens], norm=0, device="cuda", seed=tokens), tokens)


@pytest.mark.parametrize("tokens", [1, 9])
def test_float32_activations(tokens: int) -> None:
    sizes = MoeSizes(experts=40, inner=96, shared_inner=72)
    operands = moe_operands("nvfp4_routed_moe", sizes, [tokens], device="cuda", dtype=torch.float32)
    check_on_gpu("nvfp4_routed_moe", operands, tokens)


@pytest.mark.parametrize("tokens", [1, 30])
def test_ties_go_to_the_lower_expert(tokens: int) -> None:
    """Router rows in equal pairs: of the fifth pair only the lower expert is taken."""
    operands = released_weights("nvfp4_moe") | released_batch(tokens, padding_rows=0, seed=5)
    router = operands["router_weight"][:256].repeat_interleave(2, 0)
    check_on_gpu("nvfp4_moe", operands | {"router_weight": router, "num_experts_per_tok": 9}, tokens, tied=1)


def test_a_captured_step() -> None:
    """One graph, replayed with other rows and another number of real ones."""
    operands = released_weights("nvfp4_routed_moe") | released_batch(24, padding_rows=0, seed=1)
    static = {name: operands[name].clone() for name in ("x", "query_start_loc", "num_seqs")}
    run_on_gpu("nvfp4_routed_moe", operands | static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = all_specs()["nvfp4_routed_moe"].overload(*(operands | static).values())
    for tokens in (3, 24, 0, 11):
        batch = released_batch(tokens, padding_rows=24 - tokens, seed=tokens)
        for name, value in batch.items():
            static[name].copy_(value)
        graph.replay()
        assert equal_bits(out[:tokens], run_on_gpu("nvfp4_routed_moe", operands | batch)[:tokens])
