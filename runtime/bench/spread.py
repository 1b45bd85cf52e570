"""What is said of repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Spread:
    """Median, tails and extremes of ``count`` measurements, in their unit."""

    median: float
    p10: float
    p90: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of at least one value."""
        ordered = sorted(values)
        tenths = (quantile(ordered, 0.5), quantile(ordered, 0.1), quantile(ordered, 0.9))
        return cls(*tenths, ordered[0], ordered[-1], len(ordered))


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of ascending values: linear between the two that are nearest to ``share`` (0 to 1) of the way."""
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])
