from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_programs import assert_rewritten, assert_untouched, floats, trace
from torch import Tensor, nn

from qwen4exp_trt.frontend.modules import Linear
from qwen4exp_trt.passes.merge_projections import merge_projections

X = floats(x=("T", 8))


class Projections(nn.Module):
    """Three projections, combined by ``join``."""

    def __init__(self, join: Any) -> None:
        super().__init__()
        self.q, self.k, self.v, self.join = Linear(4, 8), Linear(2, 8), Linear(2, 8), join

    def forward(self, x: Tensor, states: Any) -> Any:
        return self.join(self, x)


def test_joined_projections_become_one() -> None:
    program = trace(Projections(lambda m, x: torch.cat([m.q(x), m.k(x), m.v(x)], -1)), X)
    expected = """
    q_k_v__cat = torch.ops.aten.cat.default([q__weight, k__weight, v__weight])  # float32[8, 8]
    q_k_v = torch.ops.aten.linear.default(x, q_k_v__cat)  # float32[T, 8]
    return (q_k_v,)
"""
    assert_rewritten(merge_projections, program, expected)


def test_two_joins_of_one_input_stay_two() -> None:
    program = trace(Projections(lambda m, x: (torch.cat([m.q(x), m.k(x)], -1), torch.cat([m.k(x), m.v(x)], -1))), X)
    expected = """
    q_k__cat = torch.ops.aten.cat.default([q__weight, k__weight])  # float32[6, 8]
    q_k = torch.ops.aten.linear.default(x, q_k__cat)  # float32[T, 6]
    k_v__cat = torch.ops.aten.cat.default([k__weight, v__weight])  # float32[4, 8]
    k_v = torch.ops.aten.linear.default(x, k_v__cat)  # float32[T, 4]
    return (q_k, k_v,)
"""
    assert_rewritten(merge_projections, program, expected, rewrites=2)


def join_and_return_a_part(model: Projections, x: Tensor) -> Any:
    q = model.q(x)
    return torch.cat([q, model.k(x)], -1), q


@pytest.mark.parametrize(
    "join",
    [
        pytest.param(lambda m, x: (m.q(x), m.k(x)), id="no join"),
        pytest.param(lambda m, x: torch.cat([m.q(x), m.k(torch.sigmoid(x))], -1), id="different inputs"),
        pytest.param(lambda m, x: torch.cat([m.k(x), m.v(x)]), id="joined along the tokens"),
        pytest.param(lambda m, x: torch.cat([m.q(x), torch.sigmoid(m.k(x))], -1), id="a part is no projection"),
        pytest.param(join_and_return_a_part, id="another reader of a part"),
    ],
)
def test_what_stays_as_it_is(join: Any) -> None:
    assert_untouched(merge_projections, trace(Projections(join), X))


def test_a_projection_with_bias_stays() -> None:
    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(8, 3), Linear(2, 8)

        def forward(self, x: Tensor, states: Any) -> Tensor:
            return torch.cat([self.q(x), self.k(x)], -1)

    assert_untouched(merge_projections, trace(Biased(), X))
