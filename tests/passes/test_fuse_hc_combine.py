from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_programs import BATCH, assert_rewritten, assert_untouched, conv_state, floats, trace
from torch import Tensor, nn

from qwen4exp_trt.frontend.modules import Q4E, Combine, Weight
from qwen4exp_trt.passes.fuse_hc_combine import fuse_hc_combine

INPUTS = floats(stack=("T", 8), y=("T", 4), inject=("T", 2))


COMBINE = Combine()


class Block(nn.Module):
    """A block's output returns to the stack, and ``read`` makes the outputs from the combined stack."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.hc, self.read = Weight(8), read

    def forward(self, stack: Tensor, y: Tensor, inject: Tensor, states: Any) -> Any:
        return self.read(COMBINE(stack, y, inject), self.hc.weight)


class PleBlock(nn.Module):
    """As in a layer with an n-gram embedding: that reads the combined stack, and the norm what it made of it."""

    def forward(
        self, stack: Tensor, y: Tensor, inject: Tensor, start: Tensor, lens: Tensor, slots: Tensor, count: Tensor,
        key: Tensor, conv: Tensor, gain: Tensor, states: Any,
    ) -> Tensor:  # fmt: skip
        batch = (start, lens, slots, count)
        out = Q4E.ple_conv(COMBINE(stack, y, inject), key, y, gain, gain, gain, conv, states[0], *batch, 3, 1e-6)
        return norm(out, gain)


def norm(stack: Tensor, gain: Tensor, hc_count: int = 2) -> Tensor:
    return Q4E.hc_norm(stack, gain, hc_count, 1e-6)


def test_a_pending_combine_is_fused_into_the_norm() -> None:
    program = trace(Block(lambda stack, gain: (stack, norm(stack, gain))), INPUTS)
    expected = """
    hc_combine_norm = torch.ops.q4e.hc_combine_norm.default(stack, y, inject, hc__weight, 1e-06)  # float32[T, 8], float32[T, 8]
    hc_combine_norm__combined = hc_combine_norm[0]  # float32[T, 8]
    hc_combine_norm__normed = hc_combine_norm[1]  # float32[T, 8]
    return (hc_combine_norm__combined, hc_combine_norm__normed,)
"""  # noqa: E501
    assert_rewritten(fuse_hc_combine, program, expected)


def test_of_two_norms_the_first_fuses_and_the_second_reads_the_combined_stack() -> None:
    program = trace(Block(lambda stack, gain: (norm(stack, gain), norm(stack, gain))), INPUTS)
    expected = """
    hc_combine_norm = torch.ops.q4e.hc_combine_norm.default(stack, y, inject, hc__weight, 1e-06)  # float32[T, 8], float32[T, 8]
    hc_combine_norm__combined = hc_combine_norm[0]  # float32[T, 8]
    hc_combine_norm__normed = hc_combine_norm[1]  # float32[T, 8]
    hc_norm_1 = torch.ops.q4e.hc_norm.default(hc_combine_norm__combined, hc__weight, 2, 1e-06)  # float32[T, 8]
    return (hc_combine_norm__normed, hc_norm_1,)
"""  # noqa: E501
    assert_rewritten(fuse_hc_combine, program, expected)


def test_a_combine_that_the_ngram_embedding_reads_first_stays_in_memory() -> None:
    inputs = INPUTS + BATCH + floats(key=("T", 8), conv=(8, 4), gain=(8,))
    assert_untouched(fuse_hc_combine, trace(PleBlock(), inputs, [conv_state(9, 8)]))


@pytest.mark.parametrize(
    "read",
    [
        pytest.param(lambda stack, gain: (torch.sigmoid(stack), norm(stack, gain)), id="another op reads first"),
        pytest.param(lambda stack, gain: norm(stack, gain, 4), id="the norm has other streams"),
        pytest.param(lambda stack, gain: norm(torch.sigmoid(stack), gain), id="the norm reads something else"),
        pytest.param(lambda stack, gain: stack, id="no norm"),
    ],
)
def test_what_stays_as_it_is(read: Any) -> None:
    assert_untouched(fuse_hc_combine, trace(Block(read), INPUTS))


def test_a_sum_that_is_no_combine_stays() -> None:
    class Sum(nn.Module):
        def forward(self, stack: Tensor, y: Tensor, gain: Tensor, _: Any) -> Tensor:
            return norm(stack + y, gain)

    assert_untouched(fuse_hc_combine, trace(Sum(), floats(stack=("T", 8), y=("T", 8), gain=(8,))))
