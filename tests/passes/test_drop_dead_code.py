from __future__ import annotations

from typing import Any

import torch
from tiny_programs import BATCH, assert_rewritten, assert_untouched, conv_state, floats, trace
from torch import Tensor, nn

from qwen4exp_trt.frontend.modules import Q4E, Linear, Weight
from qwen4exp_trt.passes.drop_dead_code import drop_dead_code


class Wasteful(nn.Module):
    """A chain of ops and two weights that nothing needs, beside one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.spare = Linear(4, 8), Linear(4, 8), Weight(3)

    def forward(self, x: Tensor, states: Any) -> Tensor:
        torch.sigmoid(self.k(x))
        return self.q(x)


def test_unread_ops_and_weights_are_dropped() -> None:
    expected = """
    q__linear = torch.ops.aten.linear.default(x, q__weight)  # float32[T, 4]
    return (q__linear,)
"""
    after = assert_rewritten(drop_dead_code, trace(Wasteful(), floats(x=("T", 8))), expected, rewrites=4)
    assert [spec.name for spec in after.weights] == ["q.weight"]
    assert list(after.placeholders()) == ["x", "q.weight"]


def test_an_unread_op_that_changes_a_state_stays() -> None:
    class Convolution(nn.Module):
        def forward(
            self, x: Tensor, weight: Tensor, start: Tensor, lens: Tensor, slots: Tensor, count: Tensor, states: Any
        ) -> Tensor:
            Q4E.causal_conv1d(x, weight, states[0], start, lens, slots, count)
            return torch.sigmoid(x)

    inputs = floats(x=("T", 8), weight=(8, 4)) + BATCH
    assert_untouched(drop_dead_code, trace(Convolution(), inputs, [conv_state(3, 8)]))


def test_an_unread_result_of_several_stays_while_another_is_read() -> None:
    class Projections(nn.Module):
        def forward(self, x: Tensor, weight: Tensor, states: Any) -> Tensor:
            return Q4E.hc_project(x, weight, 2)[0]

    expected = """
    hc_project = torch.ops.q4e.hc_project.default(x, weight, 2)  # float32[T, 3], float32[T, 2]
    hc_project__out = hc_project[0]  # float32[T, 3]
    return (hc_project__out,)
"""
    assert_rewritten(drop_dead_code, trace(Projections(), floats(x=("T", 8), weight=(5, 8))), expected)
