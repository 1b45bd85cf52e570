"""Floors, what bounds them, and shares, of costs made up for it."""

from __future__ import annotations

import pytest

from qwen4exp_trt.builder.inspection.costs import Roofline
from qwen4exp_trt.plugins.cost import Cost
from qwen4exp_trt.runtime.target_devices import DEVICES

COSTS = {
    "reads": Cost(weight_bytes=233_000, state_bytes=233_000),  # 2 us
    "multiplies": Cost(weight_bytes=1, flops=105_000_000 * 5),  # 5 us
    "moves": Cost(activation_bytes=10**9),
}


def test_floors_go_by_what_takes_longer() -> None:
    roofline = Roofline(COSTS, DEVICES["sm121"])
    found = {name: roofline.of_ops([name]) for name in COSTS}
    assert {name: info.seconds for name, info in found.items()} == pytest.approx(
        {"reads": 2e-6, "multiplies": 5e-6, "moves": 0}
    )
    assert {name: info.share for name, info in found.items()} == pytest.approx(
        {"reads": 2 / 7, "multiplies": 5 / 7, "moves": 0}
    )
    assert {name: info.bound for name, info in found.items()} == {
        "reads": "memory",
        "multiplies": "compute",
        "moves": "none",
    }
    both = roofline.of_all()
    assert (both.seconds, both.share, both.bound) == (pytest.approx(7e-6), pytest.approx(1), "compute")
    assert (both.weight_bytes, both.state_bytes, both.flops) == (233_001, 233_000, 525_000_000)


def test_shares_of_an_unknown_target_are_of_bytes() -> None:
    info = Roofline(COSTS, None).of_ops(["reads"])
    assert (info.seconds, info.bound) == (None, "none") and info.share == pytest.approx(466_000 / 466_001)
    assert Roofline({"moves": COSTS["moves"]}, None).of_all().share == 0
