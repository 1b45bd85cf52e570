from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_programs import assert_rewritten, assert_untouched, floats, trace
from torch import Tensor, nn
from torch.nn.functional import linear

from qwen4exp_trt.passes.fold_weights import fold_weights
from qwen4exp_trt.runtime.specs import Source, WeightRecipe
from qwen4exp_trt.runtime.weights import transform


class Weights(nn.Module):
    """Three weights, used by ``use``."""

    def __init__(self, use: Any) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(8, dtype=torch.bfloat16), requires_grad=False)
        self.first, self.second = (nn.Parameter(torch.zeros(n, 1, 8), requires_grad=False) for n in (2, 3))
        self.use = use

    def forward(self, x: Tensor, states: Any) -> Any:
        return self.use(self, x)


def source(name: str, dtype: str) -> WeightRecipe:
    return transform("cast", Source(name), dtype=dtype)


def test_a_norm_gain_becomes_one_recipe() -> None:
    program = trace(Weights(lambda m, x: x * (m.gain.float() + 1.0)), floats(x=("T", 8)))
    expected = """
    mul = torch.ops.aten.mul.Tensor(x, add__weight)  # float32[T, 8]
    return (mul,)
"""
    after = assert_rewritten(fold_weights, program, expected, rewrites=2)
    gain = transform("add", transform("cast", source("gain", "bfloat16"), dtype="float32"), value=1.0)
    made = {spec.name: (spec.tensor.shape, spec.tensor.dtype, spec.recipe) for spec in after.weights}
    assert made["add.weight"] == ((8,), "float32", gain)


def test_a_join_of_views_becomes_one_recipe() -> None:
    def project(m: Weights, x: Tensor) -> Tensor:
        return linear(x, torch.cat([m.first.view(2, 8), m.second.view(3, 8)]))

    program = trace(Weights(project), floats(x=("T", 8)))
    expected = """
    linear = torch.ops.aten.linear.default(x, cat__weight)  # float32[T, 5]
    return (linear,)
"""
    after = assert_rewritten(fold_weights, program, expected, rewrites=3)
    views = [transform("reshape", source(name, "float32"), shape=(n, 8)) for name, n in (("first", 2), ("second", 3))]
    assert {spec.name: spec.recipe for spec in after.weights}["cat.weight"] == transform("concat", *views, dim=0)


def test_a_weight_that_two_ops_read_is_made_once() -> None:
    def use(m: Weights, x: Tensor) -> Any:
        gain = m.gain.float()
        return x * gain, x + gain

    expected = """
    mul = torch.ops.aten.mul.Tensor(x, to__weight)  # float32[T, 8]
    add = torch.ops.aten.add.Tensor(x, to__weight)  # float32[T, 8]
    return (mul, add,)
"""
    assert_rewritten(fold_weights, trace(Weights(use), floats(x=("T", 8))), expected)


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda m, x: x.to(torch.bfloat16) * m.gain, id="a cast of an activation"),
        pytest.param(lambda m, x: x * torch.sigmoid(m.first), id="an op without a transform"),
        pytest.param(lambda m, x: torch.cat([x, m.first], 1), id="an activation beside a weight"),
        pytest.param(lambda m, x: x * (m.first + m.first), id="a sum of two weights"),
    ],
)
def test_what_stays_as_it_is(use: Any) -> None:
    assert_untouched(fold_weights, trace(Weights(use), floats(x=(2, "T", 8))))
