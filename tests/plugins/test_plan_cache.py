"""Plans are kept for the shapes that come again, and not for all that ever came."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from qwen4exp_trt.plugins import cuda_body
from qwen4exp_trt.plugins.cuda_body import cached_plan
from qwen4exp_trt.plugins.kernels import MOST_PLANS, Plan
from qwen4exp_trt.plugins.registry import all_specs

KEPT = 50


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_body, "MOST_PLANS", KEPT)
    monkeypatch.setattr(cuda_body, "_plans", type(cuda_body._plans)())


def plan(num_tokens: int) -> Plan:
    """Of a gather for a step of so many tokens."""
    shapes = {"rows": (num_tokens, 16), "table": (1000, 160)}
    return cached_plan(
        all_specs()["ple_gather"], shapes, {"rows": torch.int64, "table": torch.bfloat16}, {}, num_sms=48
    )


def test_many_shapes_of_prompts_stay_within_the_bound(few: None) -> None:
    decode, first = plan(1), plan(100)
    for num_tokens in range(100, 100 + 4 * KEPT):
        plan(num_tokens)
        assert plan(1) is decode, "what is used stays"
        assert len(cuda_body._plans) <= KEPT
    last = plan(99 + 4 * KEPT)
    assert plan(99 + 4 * KEPT) is last
    assert plan(100).launches == first.launches, "one that was dropped is made again"


def test_threads_share_them(few: None) -> None:
    with ThreadPoolExecutor(4) as pool:
        plans = list(pool.map(plan, list(range(1, 80)) * 4))
    assert all(plans[index].launches == plans[index % 79].launches for index in range(len(plans)))
    assert len(cuda_body._plans) <= KEPT


def test_the_bound_holds_a_hundred_shapes_of_steps() -> None:
    assert MOST_PLANS >= 100 * 40
