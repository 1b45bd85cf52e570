from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_programs import assert_rewritten, assert_untouched, floats, trace
from torch import Tensor, nn

from qwen4exp_trt.frontend.modules import Q4E, Weight
from qwen4exp_trt.passes.fuse_hc_reads import fuse_hc_reads

INPUTS = floats(stack=("T", 8), y=("T", 4), inject=("T", 2))
EPS = 1e-6


class Block(nn.Module):
    """The operands of a read; ``read`` makes the outputs from them."""

    def __init__(self, read: Any) -> None:
        super().__init__()
        self.gain, self.down, self.up, self.read = Weight(8), Weight(5, 8), Weight(8, 3), read

    def forward(self, stack: Tensor, y: Tensor, inject: Tensor, states: Any) -> Any:
        combined, normed = Q4E.hc_combine_norm(stack, y, inject, self.gain.weight, EPS)
        return self.read(self, combined, normed)

    def project(self, normed: Tensor, hc_count: int = 2) -> tuple[Tensor, Tensor]:
        return Q4E.hc_project(normed, self.down.weight, hc_count)

    def mix(self, lowrank: Tensor, normed: Tensor) -> Tensor:
        return Q4E.hc_gate_mix(lowrank, self.up.weight, normed, 2)


def whole_read(block: Block, combined: Tensor, normed: Tensor) -> Any:
    lowrank, inject = block.project(normed)
    return block.mix(lowrank, normed), combined, inject


READ = """
    hc_read = torch.ops.q4e.hc_read.default(stack, y, inject, gain__weight, down__weight, up__weight, 1e-06)  # float32[T, 8], float32[T, 4], float32[T, 2]
    hc_read__combined = hc_read[0]  # float32[T, 8]
    hc_read__mixed = hc_read[1]  # float32[T, 4]
    hc_read__inject = hc_read[2]  # float32[T, 2]
"""  # noqa: E501


def test_a_whole_read_becomes_one_op() -> None:
    expected = f"{READ}    return (hc_read__mixed, hc_read__combined, hc_read__inject,)\n"
    assert_rewritten(fuse_hc_reads, trace(Block(whole_read), INPUTS), expected)


def test_what_reads_its_results_later_is_no_hindrance() -> None:
    def read(block: Block, combined: Tensor, normed: Tensor) -> Any:
        mixed, combined, inject = whole_read(block, combined, normed)
        return torch.sigmoid(inject), torch.sigmoid(combined), mixed

    expected = f"""{READ}    sigmoid = torch.ops.aten.sigmoid.default(hc_read__inject)  # float32[T, 2]
    sigmoid_1 = torch.ops.aten.sigmoid.default(hc_read__combined)  # float32[T, 8]
    return (sigmoid, sigmoid_1, hc_read__mixed,)
"""
    assert_rewritten(fuse_hc_reads, trace(Block(read), INPUTS), expected)


def read_between(block: Block, combined: Tensor, normed: Tensor) -> Any:
    lowrank, inject = block.project(normed)
    gate = torch.sigmoid(inject)
    return block.mix(lowrank, normed), gate, combined


def other_low_rank(block: Block, combined: Tensor, normed: Tensor) -> Any:
    lowrank, inject = block.project(normed)
    return block.mix(torch.sigmoid(lowrank), normed), inject, combined


def other_normed(block: Block, combined: Tensor, normed: Tensor) -> Any:
    lowrank, inject = block.project(combined)
    return block.mix(lowrank, normed), inject, combined


def low_rank_as_output(block: Block, combined: Tensor, normed: Tensor) -> Any:
    lowrank, inject = block.project(normed)
    return block.mix(lowrank, normed), inject, combined, lowrank


def normed_as_output(block: Block, combined: Tensor, normed: Tensor) -> Any:
    return (*whole_read(block, combined, normed), normed)


@pytest.mark.parametrize(
    "read", [read_between, other_low_rank, other_normed, low_rank_as_output, normed_as_output], ids=lambda r: r.__name__
)
def test_what_stays_as_it_is(read: Any) -> None:
    assert_untouched(fuse_hc_reads, trace(Block(read), INPUTS))
