"""The mixtures of experts on a GPU at released sizes, against their bodies in float32 on the GPU."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from moe_operands import MOE_OPS, moe_operands
from op_checks import equal_bits, rms_error
from torch import Tensor

from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.sample_experts import MoeSizes

pytestmark = pytest.mark.gpu

RELEASED = MoeSizes()
TOLERANCE = 5e-3
CLOSE = 1e-4
"""Logits nearer to each other may be ordered otherwise by another order of summation."""


@cache
def weights_of(op: str) -> dict[str, Any]:
    return moe_operands(op, RELEASED, query_lens=[1], device="cuda")


def batch_of(tokens: int, padding_rows: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Rows of two sequences, and rows of padding that are NaN."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens + padding_rows, RELEASED.hidden, generator=generator, device="cuda").to(dtype)
    x[tokens:] = torch.nan
    starts = [0, tokens // 3, tokens, tokens]
    return {
        "x": x,
        "query_start_loc": torch.tensor(starts, dtype=torch.int32, device="cuda"),
        "num_seqs": torch.tensor([2], dtype=torch.int32, device="cuda"),
    }


def run(op: str, operands: dict[str, Any]) -> Tensor:
    """The kernels, with NaN in the memory that they get."""
    poison = torch.full((96 << 20,), torch.nan, device="cuda")
    del poison
    return all_specs()[op].overload(*operands.values())


def check(op: str, operands: dict[str, Any], tokens: int, tied: int = 0) -> None:
    """``tied``: experts that are as good as the last one chosen, for every token."""
    got = run(op, operands)[:tokens]
    x, top_k = operands["x"][:tokens].float(), operands["num_experts_per_tok"]
    on_cpu = {name: operands[name].cpu() for name in ("query_start_loc", "num_seqs")}
    expected = all_specs()[op].body(*(operands | {"x": x} | on_cpu).values())
    logits = (x @ operands["router_weight"].float().T).sort(-1, descending=True).values
    clear = logits[:, top_k - 1] - logits[:, top_k + tied] > CLOSE
    assert clear.any()
    assert rms_error(expected[clear].cpu(), got[clear].cpu()) < TOLERANCE
    off = (expected - got.float())[clear].norm(dim=-1) / expected[clear].norm(dim=-1)
    assert off.max() < 2 * TOLERANCE, f"a token is off by {off.max()}"
    assert equal_bits(got, run(op, operands)[:tokens])


@pytest.mark.parametrize("tokens", [1, 2, 8, 64, 512])
@pytest.mark.parametrize("op", MOE_OPS)
def test_released_sizes(op: str, tokens: int) -> None:
    """All rows of a decode step that are real, and a step with rows of padding."""
    check(op, weights_of(op) | batch_of(tokens, padding_rows=0, seed=tokens), tokens)
    if tokens > 1:
        check(op, weights_of(op) | batch_of(tokens - 1, padding_rows=3, seed=tokens + 1), tokens - 1)


@pytest.mark.parametrize("op", ["nvfp4_moe", "nvfp4_routed_moe"])
def test_a_prompt(op: str) -> None:
    check(op, weights_of(op) | batch_of(1300, padding_rows=0, seed=3), 1300)


@pytest.mark.parametrize("tokens", [1, 21, 100])
def test_many_tokens_of_few_experts(tokens: int) -> None:
    """Every expert has more tokens than a group takes; raw probabilities."""
    sizes = MoeSizes(hidden=1280, inner=384, shared_inner=256, experts=24, choices=7)
    check("nvfp4_moe", moe_operands("nvfp4_moe", sizes, [tokens], norm=0, device="cuda", seed=tokens), tokens)


@pytest.mark.parametrize("tokens", [1, 9])
def test_float32_activations(tokens: int) -> None:
    sizes = MoeSizes(experts=40, inner=96, shared_inner=72)
    operands = moe_operands("nvfp4_routed_moe", sizes, [tokens], device="cuda", dtype=torch.float32)
    check("nvfp4_routed_moe", operands, tokens)


@pytest.mark.parametrize("tokens", [1, 30])
def test_ties_go_to_the_lower_expert(tokens: int) -> None:
    """Router rows in equal pairs: of the fifth pair only the lower expert is taken."""
    operands = weights_of("nvfp4_moe") | batch_of(tokens, padding_rows=0, seed=5)
    router = operands["router_weight"][:256].repeat_interleave(2, 0)
    check("nvfp4_moe", operands | {"router_weight": router, "num_experts_per_tok": 9}, tokens, tied=1)


def test_a_captured_step() -> None:
    """One graph, replayed with other rows and another number of real ones."""
    operands = weights_of("nvfp4_routed_moe") | batch_of(24, padding_rows=0, seed=1)
    static = {name: operands[name].clone() for name in ("x", "query_start_loc", "num_seqs")}
    run("nvfp4_routed_moe", operands | static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = all_specs()["nvfp4_routed_moe"].overload(*(operands | static).values())
    for tokens in (3, 24, 0, 11):
        batch = batch_of(tokens, padding_rows=24 - tokens, seed=tokens)
        for name, value in batch.items():
            static[name].copy_(value)
        graph.replay()
        assert equal_bits(out[:tokens], run("nvfp4_routed_moe", operands | batch)[:tokens])
