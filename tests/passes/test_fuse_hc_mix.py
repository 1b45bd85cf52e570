from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_programs import assert_rewritten, assert_untouched, floats, trace
from torch import Tensor, nn

from qwen4exp_trt.frontend.modules import Q4E, Linear
from qwen4exp_trt.passes.fuse_hc_mix import fuse_hc_mix

INPUTS = floats(lowrank=("T", 3), normed=("T", 8))


class Read(nn.Module):
    def __init__(self, read: Any, up: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.read = up or Linear(8, 3), read

    def forward(self, lowrank: Tensor, normed: Tensor, states: Any) -> Any:
        return self.read(self.up(lowrank), normed)


def test_the_up_projection_and_the_mix_become_one() -> None:
    program = trace(Read(lambda logits, normed: Q4E.hc_mix(logits, normed, 2)), INPUTS)
    expected = """
    hc_gate_mix = torch.ops.q4e.hc_gate_mix.default(lowrank, up__weight, normed, 2)  # float32[T, 4]
    return (hc_gate_mix,)
"""
    assert_rewritten(fuse_hc_mix, program, expected)


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda logits, normed: (Q4E.hc_mix(logits, normed, 2), logits), id="logits that are an output"),
        pytest.param(lambda logits, normed: Q4E.hc_mix(logits, logits, 2), id="logits that are mixed themselves"),
        pytest.param(lambda logits, normed: Q4E.hc_mix(torch.sigmoid(logits), normed, 2), id="no projection"),
    ],
)
def test_what_stays_as_it_is(read: Any) -> None:
    assert_untouched(fuse_hc_mix, trace(Read(read), INPUTS))


def test_a_projection_with_bias_stays() -> None:
    assert_untouched(fuse_hc_mix, trace(Read(lambda x, normed: Q4E.hc_mix(x, normed, 2), nn.Linear(3, 8)), INPUTS))
