"""Paged batches for the tests of the indexer's selection, and the exact selection by torch, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qwen4exp_trt.plugins.registry import all_specs

all_specs()  # registers the ops


def select_operands(
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    make_keys: Any,
    make_queries: Any,
    heads: int = 4,
    dim: int = 128,
    page: int = 16,
    ratio: int = 4,
    budget: int = 2048,
    max_blocks: int = 0,
    padding: int = 0,
    device: str = "cpu",
) -> list[Any]:
    """Operands of ``qsa_select`` by position. ``make_keys(*shape)`` and ``make_queries(*shape)`` give the values.

    Pages are scattered through the pool; ``padding`` sequences and rows that are not real follow the real ones.
    """
    needed = [-(-length // (page * ratio)) for length in seq_lens]
    width = max([*needed, max_blocks, 1])
    order = torch.randperm(sum(needed) + 1, generator=torch.Generator().manual_seed(len(seq_lens)))
    table = torch.full((len(seq_lens) + padding, width), -1, dtype=torch.int32)
    start = 0
    for b, count in enumerate(needed):
        table[b, :count] = order[start : start + count]
        start += count
    starts = torch.tensor([0, *query_lens, *[0] * padding]).cumsum(0)
    tokens = int(starts[-1]) + padding
    operands = [
        make_queries(tokens, heads * dim),
        make_keys(len(order), page, dim),
        starts.int(),
        torch.tensor([*seq_lens, *[0] * padding], dtype=torch.int32),
        table,
        torch.tensor([len(seq_lens)], dtype=torch.int32),
    ]
    return [operand.to(device) for operand in operands] + [budget, ratio]


def quarters(dtype: torch.dtype, seed: int = 0, device: str = "cpu", bound: int = 4) -> Any:
    """Multiples of 1/4 up to ``bound`` / 4: sums of their products are exact, and many are equal."""
    generator = torch.Generator(device).manual_seed(seed)

    def make(*shape: int) -> Tensor:
        return (torch.randint(-bound, bound + 1, shape, generator=generator, device=device) / 4).to(dtype)

    return make


def normals(dtype: torch.dtype, seed: int = 0, device: str = "cpu") -> Any:
    generator = torch.Generator(device).manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=generator, device=device).to(dtype)


def exact_scores(args: list[Any], sequence: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Scores ``[rows, groups]`` of a sequence's new rows against all pages in its table."""
    index_q, cache, starts, _, table, _, _, _ = args
    pages = table[sequence].long()
    keys = cache[pages[pages >= 0]].flatten(0, 1).to(dtype)
    rows = index_q[int(starts[sequence]) : int(starts[sequence + 1])].unflatten(-1, (-1, keys.shape[-1])).to(dtype)
    return torch.stack([torch.relu(rows[:, head] @ keys.mT) for head in range(rows.shape[1])]).sum(0)


def exact_selection(args: list[Any]) -> Tensor:
    """The selection of the real rows, by a stable sort of `exact_scores`."""
    starts, seq_lens, num_seqs, budget, ratio = args[2].tolist(), args[3].tolist(), int(args[5]), args[6], args[7]
    count, selections = budget // ratio, []
    for b in range(num_seqs):
        scores = exact_scores(args, b)
        for row in range(scores.shape[0]):
            visible = (seq_lens[b] - (starts[b + 1] - starts[b]) + row + 1) // ratio
            order = scores[row, :visible].sort(descending=True, stable=True).indices[:count].sort().values
            selections.append(torch.nn.functional.pad(order, (0, count - len(order)), value=-1))
    return torch.stack(selections).int()
