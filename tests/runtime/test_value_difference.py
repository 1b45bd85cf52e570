"""The error of a row, and the words about what differs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from qwen4exp_trt.runtime.value_difference import describe_difference, row_error

EXPECTED = torch.arange(1.0, 65.0).view(4, 16) / 8
TOLERANCE = 0.05


def changed(row: int, columns: slice, value: float | Tensor) -> Tensor:
    got = EXPECTED.clone()
    got[row, columns] = value
    return got


def describe(got: Tensor, others: Mapping[str, Tensor] | None = None, expected: Tensor = EXPECTED) -> str:
    return describe_difference(expected, got, TOLERANCE, others or {})


def test_one_wrong_row_of_many_shows() -> None:
    """Where the RMS of the whole tensor would hide it."""
    expected = torch.randn(5000, 64)
    got = expected.clone()
    got[4321] *= 1.5
    assert row_error(expected, got) == pytest.approx(0.5, rel=0.3)
    assert (expected - got).norm() / expected.norm() < 0.01


def test_a_small_row_is_held_against_a_typical_one() -> None:
    expected = torch.cat([torch.ones(63, 8), torch.full((1, 8), 1e-6)])
    got = expected.clone()
    got[63] = 2e-6
    assert row_error(expected, got) < 2e-6
    got[63] = 0.5
    assert row_error(expected, got) == pytest.approx(0.5, rel=0.01)


def test_errors_of_other_dtypes() -> None:
    assert row_error(torch.tensor([1, 2, 3]), torch.tensor([1, 5, 4])) == 2
    assert row_error(EXPECTED, EXPECTED) == 0 and math.isnan(row_error(EXPECTED, changed(2, slice(3, 4), math.nan)))
    assert math.isnan(row_error(changed(0, slice(1), math.nan), EXPECTED))
    assert row_error(torch.empty(0, 4), torch.empty(0, 4)) == 0
    quantized = EXPECTED.to(torch.float8_e4m3fn)
    assert row_error(quantized, quantized) == 0
    assert row_error(quantized, (2 * EXPECTED).to(torch.float8_e4m3fn)) == pytest.approx(1)


def test_where_it_differs() -> None:
    assert describe(changed(2, slice(3, 5), 100.0)) == (
        "first at row 2, column 3: 100 instead of 4.5; 2 of 64 elements in 1 of 4 rows"
    )
    expected = torch.arange(24).view(2, 3, 4)
    got = expected.clone()
    got[1, 2, 0] = -7
    assert describe(got, expected=expected) == ("first at [1, 2, 0]: -7 instead of 20; 1 of 24 elements in 1 of 6 rows")


def test_what_is_there_instead() -> None:
    assert describe(changed(1, slice(0, 16), math.nan)).endswith(
        "NaN, as was there before the step: maybe nothing was written"
    )
    assert describe(changed(1, slice(0, 16), 0.0)).endswith("; all zeros")
    assert describe(changed(1, slice(0, 16), -2.5)).endswith("; all -2.5")
    ids = torch.arange(16, dtype=torch.int32).view(2, 8)
    unwritten = torch.full_like(ids, torch.iinfo(torch.int32).min)
    assert describe(unwritten, expected=ids).endswith("; what was there before the step: nothing was written")


def test_the_data_of_another_tensor() -> None:
    """At the same place in memory, whatever its dtype; not if it is elsewhere, or too little to tell."""
    other = torch.randn(4, 16) * 30
    whole = {"another": other, "third": torch.randn(4, 16)}
    assert describe(other, whole).endswith(
        "; it is what another has at the same place, so memory is used twice or an address is wrong"
    )
    assert "it is what another has" in describe(changed(1, slice(0, 16), other[1]), whole)
    assert "it is what" not in describe(changed(1, slice(0, 16), other[2]), whole)
    assert "it is what" not in describe(changed(1, slice(0, 3), other[1, :3]), whole)
    as_integers = {"ids": other.view(torch.int32)[:2].contiguous().view(-1)}
    assert "it is what ids has" in describe(changed(1, slice(0, 16), other[1]), as_integers)
    assert "it is what" not in describe(changed(3, slice(0, 16), other[3]), as_integers), "it is shorter"
