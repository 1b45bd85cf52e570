"""The kernels of the mixtures of experts for many tokens, by the emulator: tiles of any fill, skews, turns, padding."""

from __future__ import annotations

import pytest
import torch
from moe_checks import check_emulated, kernels_of, small
from moe_operands import MOE_OPS, moe_operands

from qwen4exp_trt.plugins import moe_many_launch
from qwen4exp_trt.plugins.sample_experts import MoeSizes

ENTRIES = ["many_prepare", "many_router", "many_route", "many_place", "many_gate_up", "many_down", "many_combine"]


@pytest.fixture(autouse=True)
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_many_launch, "MANY_TOKENS", 8)


@pytest.mark.parametrize(
    "op", [pytest.param(op, marks=[] if op == "nvfp4_routed_moe" else [pytest.mark.slow]) for op in MOE_OPS]
)
def test_tiles_of_tokens(op: str) -> None:
    """Experts with no token, with some, and with more than a tile takes; padding rows are NaN."""
    operands = moe_operands(op, small(), query_lens=[20, 1, 19], padding_rows=3)
    operands["x"][40:] = torch.nan
    operands["router_weight"][0] = 0.3 * operands["x"][:40].float().sign().mean(0)  # liked by many
    assert kernels_of(op, operands) == ENTRIES
    check_emulated(op, operands)


def test_rows_are_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_many_launch, "MOST_ROWS", 16)
    operands = moe_operands("nvfp4_routed_moe", small(), query_lens=[3, 17], padding_rows=14)
    assert kernels_of("nvfp4_routed_moe", operands) == 3 * ENTRIES
    check_emulated("nvfp4_routed_moe", operands)


def test_outputs_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of `down` and of the sum, with two parts of rows a block."""
    monkeypatch.setattr(moe_many_launch, "MOST_OUTPUT_BYTES", 4 * 256 * 9 * 4)
    sizes = MoeSizes(hidden=512, inner=128, shared_inner=64, experts=16, choices=3)
    operands = moe_operands("nvfp4_routed_moe", sizes, query_lens=[9])
    assert kernels_of("nvfp4_routed_moe", operands) == [*ENTRIES, *ENTRIES[-2:]]
    check_emulated("nvfp4_routed_moe", operands)


def test_ties_go_to_the_lower_expert() -> None:
    operands = moe_operands("nvfp4_moe", small(), [9])
    operands["router_weight"] = operands["router_weight"][:4].repeat_interleave(4, 0)
    check_emulated("nvfp4_moe", operands)
