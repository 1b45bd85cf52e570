"""The mixtures of experts for many tokens on a GPU at released sizes, against their bodies in float32 on the GPU."""

from __future__ import annotations

import pytest
import torch
from moe_checks import check_on_gpu, released_batch, released_weights, run_on_gpu
from moe_operands import MOE_OPS, moe_operands

from qwen4exp_trt.plugins import moe_many_launch
from qwen4exp_trt.plugins.sample_experts import MoeSizes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("op,tokens", [*((op, 700) for op in MOE_OPS), ("nvfp4_moe", 2100), ("fp8_routed_moe", 1300)])
def test_released_sizes(op: str, tokens: int) -> None:
    check_on_gpu(op, released_weights(op) | released_batch(tokens, padding_rows=5, seed=tokens), tokens)


def test_more_rows_than_a_turn() -> None:
    tokens = moe_many_launch.MOST_ROWS + 300
    check_on_gpu("nvfp4_moe", released_weights("nvfp4_moe") | released_batch(tokens, padding_rows=700, seed=2), tokens)


def test_skewed_choices() -> None:
    """Some experts have all tokens, many have none."""
    operands = released_weights("nvfp4_routed_moe") | released_batch(4096, padding_rows=0, seed=4)
    router = operands["router_weight"].clone()
    router[:6] = 0.02 * operands["x"].float().mean(0).sign()
    router[6:300] *= 0.1
    operands["x"] = operands["x"] + router[0] * 25
    check_on_gpu("nvfp4_routed_moe", operands | {"router_weight": router}, 4096)


def test_other_sizes() -> None:
    """Fewer experts, of other sizes than the shared one; raw probabilities."""
    sizes = MoeSizes(hidden=1280, inner=384, shared_inner=256, experts=48, choices=7)
    check_on_gpu("nvfp4_moe", moe_operands("nvfp4_moe", sizes, [999], norm=0, device="cuda", seed=8), 999)


def test_a_captured_step() -> None:
    """One graph, replayed with other rows and another number of real ones."""
    operands = released_weights("nvfp4_routed_moe") | released_batch(600, padding_rows=0, seed=1)
    static = {name: operands[name].clone() for name in ("x", "query_start_loc", "num_seqs")}
    run_on_gpu("nvfp4_routed_moe", operands | static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_on_gpu("nvfp4_routed_moe", operands | static)
    for tokens in (3, 600, 0, 411):
        batch = released_batch(tokens, padding_rows=600 - tokens, seed=tokens)
        for name, value in batch.items():
            static[name].copy_(value)
        graph.replay()
        assert torch.equal(out[:tokens], run_on_gpu("nvfp4_routed_moe", operands | batch)[:tokens])
