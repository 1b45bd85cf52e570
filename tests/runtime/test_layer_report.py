"""Which of several values a report is about."""

from __future__ import annotations

from math import nan
from types import SimpleNamespace
from typing import Any

import pytest

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.layer_report import check_layers, step_line
from qwen4exp_trt.runtime.layer_watch import OpCall, Place, ValueCheck
from qwen4exp_trt.runtime.side_by_side import Difference


def check(name: str, error: float, own_error: float, *sources: str) -> ValueCheck:
    place = Place(name, None, (OpCall(name, "q4e.moe", True, True),), sources, ())
    return ValueCheck(place, "bfloat16", (4, 8), error, own_error, "all zeros")


def test_nan_is_the_largest_error_of_a_step() -> None:
    checks = [check("first", 0.0, 0.1), check("second", nan, nan), check("third", 9.0, 9.0)]
    assert step_line("a step", [Difference("a step", "logits", 0.1)], checks).endswith("nan, second")


def test_the_sources_error_is_the_largest_of_them() -> None:
    checks = [check("a", 0.3, 0.0), check("b", 0.01, 0.0), check("c", 2.0, 2.0, "a", "b")]
    watch: Any = SimpleNamespace(checks=checks, tolerance=0.05, owner="")
    with pytest.raises(BundleError, match=r"from a, b \(error 0\.3 from the program's own run\)"):
        check_layers("a step", watch)
