"""Whether samples have a distribution."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping

import torch
from torch import Tensor

_QUANTILE = 3.72
"""Of the normal distribution at 1 - 1e-4: how rarely a right sampler fails, if its seeds were not fixed."""


def assert_drawn_from(samples: Tensor, probs: Tensor) -> None:
    """Chi-square test of ``samples`` (ids) against ``probs`` ``[V]``; what has no probability never occurs."""
    counts = torch.bincount(samples, minlength=len(probs))
    expected = {index: float(value) * len(samples) for index, value in enumerate(probs.tolist())}
    assert_counts_fit(dict(enumerate(counts.tolist())), expected)


def assert_counts_fit(counts: Mapping[Hashable, int], expected: Mapping[Hashable, float]) -> None:
    """Chi-square test. Outcomes that are expected less than five times are taken together."""
    assert not [outcome for outcome, count in counts.items() if count and not expected.get(outcome)], "impossible"
    rare = [outcome for outcome, value in expected.items() if value < 5]
    cells = [(counts.get(outcome, 0), value) for outcome, value in expected.items() if value >= 5]
    rest = sum(expected[outcome] for outcome in rare)
    if rest > 0:
        cells.append((sum(counts.get(outcome, 0) for outcome in rare), rest))
    statistic = sum((count - value) ** 2 / value for count, value in cells)
    assert statistic <= chi_square_limit(len(cells) - 1), f"{statistic:.1f} of {len(cells)} cells: {cells}"


def assert_same_distribution(first: Iterable[Hashable], second: Iterable[Hashable]) -> None:
    """Chi-square test that two samples of the same size come from one distribution."""
    counts: list[dict[Hashable, int]] = [{}, {}]
    for count, samples in zip(counts, (first, second), strict=True):
        for sample in samples:
            count[sample] = count.get(sample, 0) + 1
    assert sum(counts[0].values()) == sum(counts[1].values())
    pairs = [(counts[0].get(outcome, 0), counts[1].get(outcome, 0)) for outcome in {**counts[0], **counts[1]}]
    common = [pair for pair in pairs if sum(pair) >= 10]
    rare = [pair for pair in pairs if sum(pair) < 10]
    cells = [*common, *([(sum(a for a, _ in rare), sum(b for _, b in rare))] if rare else [])]
    statistic = sum((a - b) ** 2 / (a + b) for a, b in cells)
    assert statistic <= chi_square_limit(len(cells) - 1), f"{statistic:.1f} of {len(cells)} cells: {cells}"


def chi_square_limit(degrees: int) -> float:
    """The quantile of the chi-square distribution, by Wilson and Hilferty."""
    if degrees == 0:
        return 1e-6
    return degrees * (1 - 2 / (9 * degrees) + _QUANTILE * math.sqrt(2 / (9 * degrees))) ** 3
