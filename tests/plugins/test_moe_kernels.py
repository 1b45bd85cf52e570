"""The kernels of the mixtures of experts by the emulator: tensor-core paths, groups of tokens, ties, padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_emulator import run_emulated
from moe_operands import MOE_OPS, moe_operands
from op_checks import clone, equal_bits, rms_error

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins import moe_launch
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.sample_experts import MoeSizes
from qwen4exp_trt.plugins.spec import element_shape

TOLERANCE = 5e-3


def small(experts: int, choices: int, shared_inner: int = 128) -> MoeSizes:
    return MoeSizes(hidden=128, inner=128, shared_inner=shared_inner, experts=experts, choices=choices)


def check(op: str, operands: dict[str, Any]) -> None:
    """The emulated kernels against the op's body in float32, and the same bits in the other order of threads."""
    spec, args = all_specs()[op], list(operands.values())
    expected = spec.body(*clone(args, upcast=True))
    (got,) = run_emulated(spec, clone(args))
    (reverse,) = run_emulated(spec, clone(args), reverse=True)
    rows = int(operands["query_start_loc"][int(operands["num_seqs"])])
    assert rms_error(expected[:rows], got[:rows]) < TOLERANCE
    assert equal_bits(got[:rows], reverse[:rows])


def kernels_of(op: str, operands: dict[str, Any]) -> list[str]:
    spec = all_specs()[op]
    tensors, attrs = spec.split_args(list(operands.values()))
    shapes = {name: element_shape(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    plan = spec.plan(shapes, {name: tensor.dtype for name, tensor in tensors.items()}, attrs, 4)
    return [launch.kernel.entry for launch in plan.launches]


@pytest.mark.parametrize("op", MOE_OPS)
def test_one_token(op: str) -> None:
    operands = moe_operands(op, small(experts=35, choices=3), query_lens=[1], norm=0)
    assert kernels_of(op, operands) == ["router_logits", "gate_up", "down_one"]
    check(op, operands)


@pytest.mark.parametrize("op", MOE_OPS)
def test_groups_of_tokens(op: str) -> None:
    """Experts with no token, with some, and with more than a group takes."""
    operands = moe_operands(op, small(experts=16, choices=2), query_lens=[4, 1, 15], padding_rows=2)
    operands["router_weight"][0] = 0.3 * operands["x"][:20].float().sign().mean(0)  # liked by many
    assert kernels_of(op, operands) == ["router_tiles", "route", "gate_up", "down", "combine"]
    check(op, operands)


def test_groups_of_sixteen() -> None:
    check("nvfp4_moe", moe_operands("nvfp4_moe", small(experts=4, choices=2), query_lens=[11, 9]))


def test_many_rows_are_taken_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moe_launch, "MOST_ROWS", 8)
    op, sizes = "nvfp4_routed_moe", small(experts=8, choices=2, shared_inner=96)
    operands = moe_operands(op, sizes, query_lens=[3, 14], padding_rows=9)
    assert kernels_of(op, operands).count("combine") == 4
    check(op, operands)


@pytest.mark.parametrize("query_lens", [[1], [3]])
def test_ties_go_to_the_lower_expert(query_lens: list[int]) -> None:
    """All router rows alike, then pairs of them: more candidates than lanes."""
    for period in (1, 24):
        operands = moe_operands("nvfp4_moe", small(experts=48, choices=5), query_lens)
        operands["router_weight"] = operands["router_weight"][:period].repeat(48 // period, 1)
        check("nvfp4_moe", operands)


@pytest.mark.parametrize("rows", [1, 8])
def test_a_step_of_padding_alone(rows: int) -> None:
    """It ends, whatever is in the rows."""
    operands = moe_operands("nvfp4_moe", small(experts=16, choices=3), query_lens=[0], padding_rows=rows)
    operands["x"][:] = torch.nan
    run_emulated(all_specs()["nvfp4_moe"], list(operands.values()))


def test_more_experts_than_the_kernels_take_are_refused() -> None:
    operands = moe_operands("moe", small(experts=1025, choices=2), query_lens=[1])
    with pytest.raises(PluginError, match="up to 1024 experts, of which a token chooses 1 to 64; got 1025 experts"):
        kernels_of("moe", operands)
