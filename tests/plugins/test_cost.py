"""The sums of a step's cost against what counting one by one gives."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.cost import (
    Cost,
    StepSize,
    attended_tokens,
    completed_groups,
    expected_experts,
    moved_kv_tokens,
    ring_bytes,
    scored_groups,
    selected_tokens,
    sum_costs,
    sum_of_groups,
    visible_groups,
)
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.spec import OpSpec

STEPS = [
    StepSize(num_seqs, num_seqs * rows, context)
    for num_seqs, rows, context in itertools.product((1, 3), (1, 4, 9, 40), (0, 1, 7, 18, 19, 20, 100))
]


def positions(size: StepSize) -> range:
    """Tokens up to each new one of a sequence, itself among them."""
    return range(size.context_len + 1, size.seq_len + 1)


@pytest.mark.parametrize("size", STEPS, ids=str)
def test_groups_and_attended_tokens(size: StepSize) -> None:
    ratio, most = 4, selected_tokens(num_groups=4, ratio=4)
    assert most == 19
    assert attended_tokens(size, most) == sum(min(count, most) for count in positions(size))
    assert attended_tokens(size, None) == sum(positions(size))
    groups = sum_of_groups(size.seq_len, ratio) - sum_of_groups(size.context_len, ratio)
    assert groups == sum(count // ratio for count in positions(size))
    assert completed_groups(size, ratio) == size.num_seqs * sum(count % ratio == 0 for count in positions(size))
    assert visible_groups(size, ratio) == size.seq_len // ratio


def test_a_dense_attention_selects_all() -> None:
    assert selected_tokens(num_groups=7, ratio=0) is None


def test_keys_are_read_where_more_groups_are_seen_than_selected() -> None:
    assert [scored_groups(StepSize(2, 2, context), ratio=4, most=4) for context in (0, 18, 19, 99)] == [0, 0, 5, 25]


def test_no_token_of_a_cache_is_read_twice_in_a_step() -> None:
    assert moved_kv_tokens(StepSize(1, 1, 99), 19) == 19 + 1
    assert moved_kv_tokens(StepSize(2, 8, 96), 19) == 2 * (4 * 19 + 4)
    assert moved_kv_tokens(StepSize(1, 40, 60), 19) == 100 + 40


def test_rings_are_read_behind_a_context_and_written_once_round() -> None:
    assert ring_bytes(StepSize(2, 2, 100), row_bytes=10, num_rows=11, rows_read=3) == 2 * 10 * (3 + 1)
    assert ring_bytes(StepSize(1, 1, 2), row_bytes=10, num_rows=11, rows_read=3) == 10 * (2 + 1)
    assert ring_bytes(StepSize(1, 50, 0), row_bytes=10, num_rows=11, rows_read=3) == 10 * 11


def test_expected_experts_are_those_of_random_choices() -> None:
    """All choices of two of five experts by three tokens, each as likely."""
    pairs = list(itertools.combinations(range(5), 2))
    counts = [len({*a, *b, *c}) for a, b, c in itertools.product(pairs, repeat=3)]
    assert expected_experts(5, 2, 3) == pytest.approx(sum(counts) / len(counts))
    assert expected_experts(512, 10, 1) == pytest.approx(10)


@pytest.mark.parametrize(("seqs", "tokens", "context"), [(0, 0, 0), (2, 3, 0), (1, 1, -1), (2, 0, 5)])
def test_a_step_is_of_whole_rows(seqs: int, tokens: int, context: int) -> None:
    with pytest.raises(PluginError, match="expected at least one sequence, as many tokens of each"):
        StepSize(seqs, tokens, context)


def test_costs_add_up() -> None:
    total = sum_costs([Cost(1, 2, 3, 4), Cost(10, 20, 30, 40)])
    assert total == Cost(11, 22, 33, 44)
    assert total.memory_bytes == 33


@pytest.mark.parametrize("spec", all_specs().values(), ids=all_specs().keys())
def test_the_cost_of_every_op_names_its_operands(spec: OpSpec) -> None:
    """On its own samples; never negative, no operand that it has not, and more tokens are never cheaper."""
    case = spec.cases[0].make(torch.bfloat16 if torch.bfloat16 in spec.tolerance else torch.float32, torch.Generator())
    tensors = {arg.name: case[arg.name] for arg in spec.inputs}
    attrs = {attr.name: case[attr.name] for attr in spec.attrs}
    size = StepSize(1, 1, 64)
    work = spec.work(tensors, attrs, size)
    assert work.moved.keys() == {arg.name for arg in (*spec.inputs, *spec.outputs)}
    assert min(work.moved.values()) >= 0 and work.flops >= 0
    longer = spec.work(tensors, attrs, replace(size, context_len=640))
    assert all(longer.moved[name] >= num_bytes for name, num_bytes in work.moved.items())
    assert longer.flops >= work.flops
