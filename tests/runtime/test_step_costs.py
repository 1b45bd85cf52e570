"""What single ops of a program have to move and multiply, counted by hand."""

from __future__ import annotations

import pytest
import torch
from tiny_programs import floats, trace
from torch import Tensor, nn

from qwen4exp_trt.plugins.cost import Cost, StepSize
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.specs import TensorSpec
from qwen4exp_trt.runtime.step_costs import floor_seconds, step_cost, step_costs
from qwen4exp_trt.runtime.target_devices import DEVICES

IDS = TensorSpec("ids", ("T",), "int32")
WIDTH, ROWS = 8, 5


class Layer(nn.Module):
    def forward(self, x: Tensor, table: Tensor, weight: Tensor, ids: Tensor, states: object) -> tuple[Tensor, ...]:
        embedded = torch.nn.functional.embedding(ids, table)
        return ((torch.nn.functional.linear(x, weight) + embedded).unsqueeze(1),)


@pytest.fixture(scope="module")
def program() -> Program:
    return trace(Layer(), (*floats(x=("T", WIDTH), table=(100, ROWS), weight=(ROWS, WIDTH)), IDS))


def test_aten_ops_by_their_shapes(program: Program) -> None:
    """A row of a table for each token, a product, elementwise work without FLOPs, and views for nothing."""
    tokens = 3
    costs = {each.op: each.cost for each in step_costs(program, StepSize(1, tokens, 0))}
    row_bytes = 4 * ROWS
    assert costs == {
        "aten.embedding": Cost(activation_bytes=4 * tokens + 2 * tokens * row_bytes),
        "aten.linear": Cost(
            activation_bytes=4 * (tokens * WIDTH + ROWS * WIDTH + tokens * ROWS), flops=2 * tokens * WIDTH * ROWS
        ),
        "aten.add": Cost(activation_bytes=3 * tokens * row_bytes),
        "aten.unsqueeze": Cost(),
    }
    assert step_cost(program, StepSize(1, tokens, 0)).flops == 2 * tokens * WIDTH * ROWS


def test_a_floor_is_of_bytes_or_of_products() -> None:
    device = DEVICES["sm121"]
    assert floor_seconds(Cost(weight_bytes=233, state_bytes=466, activation_bytes=10**6), device) == pytest.approx(3e-9)
    assert floor_seconds(Cost(weight_bytes=1, flops=105_000), device) == pytest.approx(1e-9)
