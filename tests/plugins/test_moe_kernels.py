"""The kernels of the mixtures of experts by the emulator: tensor-core paths, groups of tokens, ties, padding."""

from __future__ import annotations

import pytest
import torch
from kernel_emulator import run_emulated
from moe_checks import check_emulated, kernels_of, small
from moe_operands import MOE_OPS, moe_operands

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins import moe_launch
from qwen4exp_trt.plugins.registry import all_specs


@pytest.mark.parametrize("op", MOE_OPS)
def test_one_token(op: str) -> None:
    operands = moe_operands(op, small(), query_lens=[1])
    assert kernels_of(op, operands) == ["router_logits", "gate_up", "down_one"]
    check_emulated(op, operands)


@pytest.mark.parametrize("op", ["nvfp4_moe", "nvfp4_routed_moe", "fp8_routed_moe"])
def test_groups_of_tokens(op: str) -> None:
    """Experts with no token, with some, and with more than a group takes."""
    operands = moe_operands(op, small(), query_lens=[4, 1, 10], padding_rows=1)
    operands["router_weight"][0] = 0.3 * operands["x"][:15].float().sign().mean(0)  # liked by many
    assert kernels_of(op, operands) == ["router_tiles", "route", "gate_up", "down", "combine"]
    check_emulated(op, operands)


def test_groups_of_sixteen() -> None:
    check_emulated("nvfp4_moe", moe_operands("nvfp4_moe", small(), query_lens=[11, 15]))


def test_many_rows_are_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_launch, "MOST_ROWS", 8)
    operands = moe_operands("nvfp4_routed_moe", small(), query_lens=[3, 14], padding_rows=7)
    assert kernels_of("nvfp4_routed_moe", operands).count("combine") == 3
    check_emulated("nvfp4_routed_moe", operands)


@pytest.mark.parametrize("tokens,experts,choices,period", [(1, 48, 5, 1), (1, 48, 5, 24), (3, 16, 3, 1), (3, 16, 3, 8)])
def test_ties_go_to_the_lower_expert(tokens: int, experts: int, choices: int, period: int) -> None:
    """All router rows alike, also more than a warp has lanes, or pairs of them."""
    operands = moe_operands("nvfp4_moe", small(experts, choices), [tokens])
    operands["router_weight"] = operands["router_weight"][:period].repeat(experts // period, 1)
    check_emulated("nvfp4_moe", operands)


@pytest.mark.parametrize("rows", [1, 8])
def test_a_step_of_padding_alone(rows: int) -> None:
    """It ends, whatever is in the rows."""
    operands = moe_operands("nvfp4_moe", small(), query_lens=[0], padding_rows=rows)
    operands["x"][:] = torch.nan
    run_emulated(all_specs()["nvfp4_moe"], list(operands.values()))


def test_more_experts_than_the_kernels_take_are_refused() -> None:
    operands = moe_operands("moe", small(experts=1025), query_lens=[1])
    with pytest.raises(PluginError, match="up to 1024 experts, of which a token chooses 1 to 64; got 1025 experts"):
        kernels_of("moe", operands)
