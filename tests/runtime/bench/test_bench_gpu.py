"""The whole command on a GPU, by the program itself: times of the device, captured steps, sensors."""

from __future__ import annotations

import json
from typing import Any

import bundles
import pytest

from qwen4exp_trt.runtime.bench.__main__ import main

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bench")
    bundle, file = bundles.build_for_gpu(folder / "demo", "bfloat16", max_batch_size=4), folder / "result.json"
    flags = ("--device", "cuda", "--quick", "--seconds", "1", "--context", "1024", "--prompt", "64,700", "--check")
    assert main([str(bundle), *flags, "--json", str(file)]) == 0
    return json.loads(file.read_text())


def test_steps_have_times_of_the_device(found: dict[str, Any]) -> None:
    assert (found["state"], found["failed"]) == ("complete", [])
    assert found["load"]["cuda_graphs"] == "own" and found["load"]["prepared_steps"]["shapes"] > 0
    for row in found["decode"]:
        if row["case"]["kind"] == "draft":
            assert row["device"] is None
            continue
        assert 0 < row["device"]["step_ms"]["median"] < row["first_step_ms"]
        assert row["device"]["enqueue_ms"]["count"] == row["device"]["step_ms"]["count"] >= 3
        assert row["host_ms"] == pytest.approx(row["step_ms"]["median"] - row["device"]["step_ms"]["median"])
    for row in found["prefill"]:
        assert row["last_chunk_ms"] > 0 and row["peak_bytes"] > 0
    assert all((row["device_step_ms"] is None) == row["case"]["with_drafts"] for row in found["generate"])


def test_the_program_agrees_with_itself_op_by_op(found: dict[str, Any]) -> None:
    agreement = found["checked"]["agreement"]
    assert agreement["logits_error"] < 0.02
    assert agreement["tokens"] == 16


def test_the_gpu_is_described(found: dict[str, Any]) -> None:
    gpu = found["environment"]["gpu"]
    assert gpu["name"] and gpu["architecture"].startswith("sm") and gpu["multiprocessors"] > 0
    assert found["memory"]["after_loading"]["gpu_allocated"] > 0
