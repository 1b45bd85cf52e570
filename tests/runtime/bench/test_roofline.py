from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qwen4exp_trt.plugins.cost import StepSize
from qwen4exp_trt.runtime.bench import roofline
from qwen4exp_trt.runtime.bench.cases import DecodeCase, StepKind
from qwen4exp_trt.runtime.bench.rates import Bandwidth
from qwen4exp_trt.runtime.bench.roofline import Rooflines, decode_floor, make_rooflines, prefill_floor
from qwen4exp_trt.runtime.manifest import DRAFT_DIR, PROGRAM_DIR
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.program_text import load_program
from qwen4exp_trt.runtime.step_costs import step_cost
from qwen4exp_trt.runtime.target_devices import DEVICES

SLOW_MEMORY = make_rooflines(torch.device("cpu"), Bandwidth(copy=2e6, read=1e6), matmul_rate=1e15)
SLOW_PRODUCTS = make_rooflines(torch.device("cpu"), Bandwidth(copy=1e15, read=2e15), matmul_rate=1e6)


@pytest.fixture(scope="module")
def model(mtp_bundle: Path) -> Program:
    return load_program(mtp_bundle / PROGRAM_DIR)


@pytest.fixture(scope="module")
def head(mtp_bundle: Path) -> Program:
    return load_program(mtp_bundle / DRAFT_DIR / PROGRAM_DIR)


def test_the_faster_of_copy_and_read_is_the_bandwidth() -> None:
    assert SLOW_MEMORY.measured.bytes_per_second == 2e6
    assert SLOW_PRODUCTS.measured.bytes_per_second == 2e15
    assert SLOW_MEMORY.published is None, "nothing is published of this CPU"


def test_what_is_published_is_found_by_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {"name": "NVIDIA GB10", "total_memory": 2**37, "is_integrated": 1, "multi_processor_count": 48}
    gpu = SimpleNamespace(**properties, major=12, minor=1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    found = make_rooflines(torch.device("cuda", 0), Bandwidth(copy=2e11, read=2.2e11), matmul_rate=9e13)
    assert found.published == DEVICES["sm121"]
    assert (found.measured.name, found.measured.bytes_per_second) == ("NVIDIA GB10", 2.2e11)
    gpu.major = 9
    assert make_rooflines(torch.device("cuda", 0), Bandwidth(1, 1), 1).published is None


def test_a_step_is_bound_by_its_bytes_or_its_products(model: Program) -> None:
    cost = step_cost(model, StepSize(2, 2, 30, num_logits=2))
    floor = decode_floor(model, None, DecodeCase(2, 30), SLOW_MEMORY)
    assert (floor.weight_bytes, floor.state_bytes, floor.flops) == (cost.weight_bytes, cost.state_bytes, cost.flops)
    assert floor.measured_ms == pytest.approx(1e3 * (cost.weight_bytes + cost.state_bytes) / 2e6)
    assert floor.published_ms is None
    assert decode_floor(model, None, DecodeCase(2, 30), SLOW_PRODUCTS).measured_ms == pytest.approx(cost.flops / 1e3)


def test_the_published_floor_is_of_the_target(model: Program) -> None:
    gb10 = Rooflines(DEVICES["sm121"], SLOW_MEMORY.measured)
    floor = decode_floor(model, None, DecodeCase(1, 30), gb10)
    assert floor.published_ms == pytest.approx(1e3 * (floor.weight_bytes + floor.state_bytes) / 233e9)
    assert floor.shares(2 * floor.published_ms)["published"] == pytest.approx(0.5)


def test_drafts_cost_rows_of_the_model_and_runs_of_the_head(model: Program, head: Program) -> None:
    plain = decode_floor(model, head, DecodeCase(2, 30), SLOW_MEMORY)
    verify = decode_floor(model, head, DecodeCase(2, 30, StepKind.VERIFY, 3), SLOW_MEMORY)
    draft = decode_floor(model, head, DecodeCase(2, 30, StepKind.DRAFT, 3), SLOW_MEMORY)
    run = step_cost(head, StepSize(2, 2, 30))
    assert verify.flops == step_cost(model, StepSize(2, 8, 30, num_logits=8)).flops > plain.flops
    assert draft.weight_bytes == verify.weight_bytes + 3 * run.weight_bytes
    assert draft.state_bytes == verify.state_bytes + 3 * run.state_bytes
    assert run.state_bytes > step_cost(head, StepSize(2, 2, 0)).state_bytes, "the head reads its cache"
    assert draft.measured_ms > verify.measured_ms > plain.measured_ms


def test_a_prompt_is_the_sum_of_its_chunks(model: Program) -> None:
    sizes = [StepSize(1, 8, 0, num_logits=1), StepSize(1, 8, 8, num_logits=1), StepSize(1, 4, 16, num_logits=1)]
    costs = [step_cost(model, size) for size in sizes]
    floor = prefill_floor(model, (8, 8, 4), SLOW_MEMORY)
    assert floor.flops == sum(cost.flops for cost in costs)
    assert floor.weight_bytes == sum(cost.weight_bytes for cost in costs)


def test_of_many_chunks_some_stand_for_all(model: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Close to the sum of all, at a fraction of its time, and exact in what does not grow with the context."""
    chunks = (8,) * 40 + (3,)
    monkeypatch.setattr(roofline, "_MOST_CHUNKS", 100)
    exact = prefill_floor(model, chunks, SLOW_MEMORY)
    monkeypatch.setattr(roofline, "_MOST_CHUNKS", 8)
    asked = list[StepSize]()
    monkeypatch.setattr(roofline, "step_cost", lambda model, size: asked.append(size) or step_cost(model, size))
    found = prefill_floor(model, chunks, SLOW_MEMORY)
    assert len(asked) == 9 and asked[-1] == replace(asked[-1], num_tokens=3, context_len=320)
    assert found.weight_bytes == exact.weight_bytes
    assert found.measured_ms == pytest.approx(exact.measured_ms, rel=2e-3)
    assert found.flops == pytest.approx(exact.flops, rel=2e-3)
