"""The selection's kernels on a GPU at released dims, up to 65,536 groups: exact, whatever ties there are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from qsa_batches import exact_scores, exact_selection, normals, quarters, select_operands
from torch import Tensor

from qwen4exp_trt.plugins.qsa_select import launch
from qwen4exp_trt.plugins.registry import all_specs

pytestmark = pytest.mark.gpu
SPEC = all_specs()["qsa_select"]
LONGEST = 262_144


def select(args: list[Any]) -> Tensor:
    """The op on poisoned memory."""
    del_me = torch.full((1 << 26,), torch.nan, device="cuda")
    del del_me
    return SPEC.overload(*args)


def check(args: list[Any]) -> None:
    expected = exact_selection(args)
    assert torch.equal(select(args)[: len(expected)], expected)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bfloat16, device="cuda")


MIXED = [
    2047,
    2048,
    2051,
    2052,
    2063,
    2080,
    4096,
    8191,
    32_768,
    32_772,
    32_800,
    33_000,
    65_536,
    100_001,
    262_143,
    LONGEST,
]


@pytest.mark.parametrize(
    "query_lens,seq_lens",
    [
        ([1], [LONGEST]),
        ([8], [LONGEST]),
        ([5], [2055]),
        ([1 + i % 8 for i in range(16)], MIXED),
        ([1] * 64, [40 + 1111 * i for i in range(64)]),
        ([8] * 64, [2040 + 500 * i for i in range(64)]),
        ([700, 1, 33], [9000, 50_000, 33]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_selection_is_exact(query_lens: Sequence[int], seq_lens: Sequence[int], dtype: torch.dtype) -> None:
    keys, queries = quarters(dtype, 1, "cuda"), quarters(dtype, 2, "cuda")
    check(select_operands(query_lens, seq_lens, keys, queries, padding=2, max_blocks=4096, device="cuda"))


@pytest.mark.parametrize("shares", [(0.0,), (0.001,), (0.02,), (0.4,), (1.0,), (0.5, 0.004), (0.9, 0.5, 0.002)])
def test_ties_go_to_the_lower_group(shares: tuple[float, ...]) -> None:
    """Few levels of scores: fewer positive ones than are selected, or more equal ones than can be candidates."""

    def keys(*shape: int) -> Tensor:
        draws = torch.rand((*shape[:-1], 1), device="cuda")
        return torch.stack([draws < share for share in shares]).sum(0).to(torch.bfloat16).expand(shape).contiguous()

    check(select_operands([1, 2, 8, 1], [LONGEST, 40_000, 20_000, 3000], keys, ones, device="cuda"))


def test_neighbours_share_the_highest_scores() -> None:
    """The best groups side by side, which makes the bound of the candidates a weak one."""
    args = select_operands([1], [LONGEST], quarters(torch.bfloat16, 3, "cuda"), ones, device="cuda")
    pages = args[4][0, 100:140].long()
    args[1][pages] = (args[1][pages].float().abs() + 2).bfloat16()
    check(args)


def test_scores_of_any_size_keep_their_order() -> None:
    args = select_operands([1], [LONGEST], normals(torch.bfloat16, 4, "cuda"), ones, device="cuda")
    keys = args[1].view(-1, 128)
    keys[:, 1:] = 0
    keys[:] = (
        keys.float() * torch.exp2(torch.arange(len(keys), device="cuda").remainder(200) - 100.0)[:, None]
    ).bfloat16()
    keys[7], keys[9, 0], keys[11, 0] = -0.0, torch.inf, 3e38
    check(args)


@pytest.mark.parametrize("rows,length", [(1, LONGEST), (8, 100_000)])
def test_random_scores_are_split_at_a_threshold(rows: int, length: int) -> None:
    """With operands of any value, sums depend on their order: what is left out is no higher but for rounding."""
    args = select_operands(
        [rows], [length], normals(torch.bfloat16, 5, "cuda"), normals(torch.bfloat16, 6, "cuda"), device="cuda"
    )
    selected, scores = select(args).long(), exact_scores(args, 0)
    assert torch.equal(select(args).long(), selected)
    for row in range(rows):
        visible = (length - rows + row + 1) // 4
        is_selected = torch.zeros(visible, dtype=torch.bool, device="cuda")
        is_selected[selected[row]] = True
        assert int(is_selected.sum()) == 512 and bool((selected[row].diff() > 0).all())
        lowest, highest = scores[row, :visible][is_selected].min(), scores[row, :visible][~is_selected].max()
        assert lowest >= highest * (1 - 1e-5)


def test_a_step_larger_than_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SCRATCH_BYTES", 8 << 20)
    keys, queries = quarters(torch.bfloat16, 7, "cuda"), quarters(torch.bfloat16, 8, "cuda")
    check(select_operands([3, 301, 2], [99_000, 120_000, 77_777], keys, queries, max_blocks=2111, device="cuda"))


def test_more_best_scores_than_a_block_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "SELECT_THREADS", (128, 128))
    make = quarters(torch.bfloat16, 10, "cuda")
    check(select_operands([2, 1], [LONGEST, 30_000], make, make, max_blocks=4097, device="cuda"))


def test_a_captured_step_follows_the_lengths() -> None:
    """One graph serves a step of padding, dense steps and sparse ones."""
    make = quarters(torch.bfloat16, 9, "cuda")
    args = select_operands([1] * 8, [200_000] * 8, make, make, max_blocks=4096, device="cuda")
    lens, table = args[3].clone(), args[4].clone()
    args[3].zero_()
    args[5].zero_()
    args[4].fill_(-1)
    select(args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selected = SPEC.overload(*args)
    graph.replay()
    args[4].copy_(table)
    for count, divisor in ((8, 200), (5, 7), (8, 1)):
        args[5].fill_(count)
        args[3].copy_(lens // divisor)
        graph.replay()
        assert torch.equal(selected[:count], exact_selection(args))
