from __future__ import annotations

import random
import statistics

import pytest

from qwen4exp_trt.runtime.bench.spread import Spread, quantile


def test_of_eleven_values() -> None:
    values = [*map(float, range(10)), 60.0]
    random.Random(0).shuffle(values)
    assert Spread.of(values) == Spread(median=5, p10=1, p90=9, least=0, most=60, count=11)


def test_of_one_value() -> None:
    assert Spread.of([7.0]) == Spread(median=7, p10=7, p90=7, least=7, most=7, count=1)


@pytest.mark.parametrize("count", [2, 3, 4, 10, 37])
def test_equals_the_standard_library(count: int) -> None:
    values = [random.Random(count).gauss(0, 1) for _ in range(count)]
    values = sorted(values + [random.Random(7).random() for _ in range(count)])
    assert quantile(values, 0.5) == pytest.approx(statistics.median(values))
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    assert [quantile(values, tenth / 10) for tenth in range(1, 10)] == pytest.approx(deciles)
