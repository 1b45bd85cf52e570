"""The whole command over a bundle with engines that TensorRT built, in BF16, which the simulator executes."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import bundles
import pytest

from qwen4exp_trt.runtime.bench.checks import Agreement

from .conftest import run_over_the_simulator

pytestmark = [pytest.mark.trt, pytest.mark.slow]


def test_everything_runs_on_the_engines(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    checkpoint = bundles.mtp_checkpoint(tmp_path_factory.getbasetemp())
    bundle = bundles.build(checkpoint, tmp_path / "bundle", activation_dtype="bfloat16", max_batch_size=2)
    run_over_the_simulator(bundle, tmp_path / "result.json")
    found = json.loads((tmp_path / "result.json").read_text())
    assert (found["state"], found["failed"]) == ("complete", [])
    assert found["checked"]["agreement"] == asdict(Agreement(16, 16, 0, 0, None))
    assert [row["case"]["kind"] for row in found["decode"]] == ["plain", "verify", "draft"]
    assert len(found["load"]["engines"]) == 2
