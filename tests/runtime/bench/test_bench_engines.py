"""The whole command over engines that the simulator executes: the dry run of what happens on a GB10."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import bundles
import pytest
from simulated_engines import load_simulated_backend

from qwen4exp_trt.runtime import llm
from qwen4exp_trt.runtime.bench import session
from qwen4exp_trt.runtime.bench.__main__ import main
from qwen4exp_trt.runtime.bench.checks import Agreement

from .conftest import QUICK

pytestmark = pytest.mark.trt


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With engines of a model and its draft head."""
    base = tmp_path_factory.getbasetemp()
    checkpoint = bundles.mtp_checkpoint(base)
    return bundles.build(checkpoint, base / "bench-engines", activation_dtype="bfloat16", max_batch_size=2)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm, "load_backend", load_simulated_backend)
    monkeypatch.setattr(session, "check_can_compare", lambda backend, device: None)


@pytest.mark.usefixtures("simulated")
def test_decode_prompts_and_drafts_run_on_the_engines(bundle: Path, tmp_path: Path) -> None:
    sizes = ("--batch", "2", "--prompt", "3,20", "--context", "20", "--drafts", "2", "--iterations", "2")
    more = ("--check", "--json", str(tmp_path / "f"))
    assert main([str(bundle), *QUICK, *sizes, *more]) == 0
    found: dict[str, Any] = json.loads((tmp_path / "f").read_text())
    assert (found["state"], found["failed"]) == ("complete", [])
    assert [row["case"]["kind"] for row in found["decode"]] == ["plain", "verify", "draft"]
    assert [row["chunks"] for row in found["prefill"]] == [[3], [8, 8, 4]]
    assert found["checked"]["agreement"] == asdict(Agreement(16, 16, 0, 0, None))
    load = found["load"]
    assert (load["backend"], load["cuda_graphs"]) == ("tensorrt-rtx", "own")
    assert load["prepared_steps"]["shapes"] >= 3 and load["prepared_steps"]["seconds"] > 0
    for engine in load["engines"]:
        assert engine["tensorrt"].startswith("tensorrt_rtx ")
        assert engine["deserialize_seconds"] > 0 and engine["context_seconds"] > 0
        assert engine["jit_cache"] == {"is_hit": False, "bytes": 0}
    assert len(load["engines"]) == 2
