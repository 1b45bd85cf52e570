from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_programs import assert_rewritten, assert_untouched, floats, trace
from torch import Tensor, nn
from torch.nn.functional import silu

from qwen4exp_trt.frontend.modules import Linear
from qwen4exp_trt.passes.merge_hc_projections import merge_hc_projections

X = floats(x=("T", 8))


class Read(nn.Module):
    """The two thin projections of a hyper-connection with two streams, combined by ``read``."""

    def __init__(self, read: Any, inject_rows: int = 2) -> None:
        super().__init__()
        self.down, self.inject, self.read = Linear(3, 8), Linear(inject_rows, 8), read

    def forward(self, x: Tensor, states: Any) -> Any:
        return self.read(self, x)


def lowrank(model: Read, x: Tensor, divisor: int = 2) -> Tensor:
    return silu(model.down(x) / divisor)


def inject(model: Read, x: Tensor, divisor: int = 2, factor: int = 2) -> Tensor:
    return torch.sigmoid(model.inject(x) / divisor) * factor


PROJECT = """
    hc_project__cat = torch.ops.aten.cat.default([down__weight, inject__weight])  # float32[5, 8]
    hc_project = torch.ops.q4e.hc_project.default(x, hc_project__cat, 2)  # float32[T, 3], float32[T, 2]
    hc_project__lowrank = hc_project[0]  # float32[T, 3]
    hc_project__inject = hc_project[1]  # float32[T, 2]
"""


def test_both_projections_become_one() -> None:
    program = trace(Read(lambda model, x: (lowrank(model, x), inject(model, x))), X)
    expected = f"{PROJECT}    return (hc_project__lowrank, hc_project__inject,)\n"
    assert_rewritten(merge_hc_projections, program, expected)


def test_the_product_comes_before_the_first_reader_of_either_result() -> None:
    program = trace(Read(lambda model, x: (torch.sigmoid(inject(model, x)), lowrank(model, x))), X)
    expected = f"""{PROJECT}    sigmoid_1 = torch.ops.aten.sigmoid.default(hc_project__inject)  # float32[T, 2]
    return (sigmoid_1, hc_project__lowrank,)
"""
    assert_rewritten(merge_hc_projections, program, expected)


def test_of_two_low_ranks_one_takes_the_inject() -> None:
    """One inject cannot be merged twice: its weight would be read twice."""
    program = trace(Read(lambda model, x: (lowrank(model, x), inject(model, x), lowrank(model, x))), X)
    expected = f"""{PROJECT}    down__linear_1 = torch.ops.aten.linear.default(x, down__weight)  # float32[T, 3]
    div_2 = torch.ops.aten.div.Tensor(down__linear_1, 2)  # float32[T, 3]
    silu_1 = torch.ops.aten.silu.default(div_2)  # float32[T, 3]
    return (hc_project__lowrank, hc_project__inject, silu_1,)
"""
    assert_rewritten(merge_hc_projections, program, expected)


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lowrank, id="the final mixer, which has no inject"),
        pytest.param(inject, id="no low rank"),
        pytest.param(lambda m, x: (lowrank(m, x, 4), inject(m, x)), id="different divisors"),
        pytest.param(lambda m, x: (lowrank(m, torch.sigmoid(x)), inject(m, x)), id="different inputs"),
        pytest.param(lambda m, x: (lowrank(m, x), inject(m, x, factor=3)), id="another factor"),
        pytest.param(lambda m, x: (lowrank(m, x, 4), inject(m, x, 4)), id="a divisor that is not the inject rows"),
    ],
)
def test_what_stays_as_it_is(read: Any) -> None:
    assert_untouched(merge_hc_projections, trace(Read(read), X))


def test_a_projection_with_bias_stays() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.inject = nn.Linear(8, 3), Linear(2, 8)

        def forward(self, x: Tensor, states: Any) -> Any:
            return silu(self.down(x) / 2), torch.sigmoid(self.inject(x) / 2) * 2

    assert_untouched(merge_hc_projections, trace(Biased(), X))
