"""Runs of the command on the CPU that do not go as they should, or not by the checkpoint alone."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import bundles
import pytest

from qwen4exp_trt.runtime.bench import results, session
from qwen4exp_trt.runtime.bench.__main__ import main
from qwen4exp_trt.runtime.bench.cases import DecodeCase, PrefillCase
from qwen4exp_trt.runtime.disk_speed import DiskSpeed
from qwen4exp_trt.runtime.engine_core import EngineCore
from qwen4exp_trt.runtime.ngram_rows import _Table

from .conftest import QUICK

Capture = pytest.CaptureFixture[str]


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def test_a_table_on_disk_is_read_and_its_place_is_not_told(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = DiskSpeed(str(tmp_path), "ext4", False, 90.0, 0.2, 0.01, uses_threads=False)
    monkeypatch.setattr(_Table, "measure_disk", lambda self: speed)
    bundle, file = bundles.disk_bundle(tmp_path_factory.getbasetemp()), tmp_path / "result.json"
    flags = ("--batch", "1", "--context", "20", "--drafts", "0", "--decode-only", "--json", str(file))
    assert main([str(bundle), *QUICK, *flags]) == 0
    (disk,) = read(file)["load"]["ngram_table"]["disks"].values()
    assert disk["file_system"] == "ext4" and disk["token_ms"] == 0.2
    assert str(tmp_path) not in file.read_text()


def test_an_interrupted_run_keeps_what_it_has(
    mtp_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """In the middle of the second case, and the file was there after the first."""
    file, seen = tmp_path / "result.json", list[dict[str, Any]]()

    def measure(bundle: Any, case: Any, effort: Any) -> Any:
        if isinstance(case, PrefillCase):
            return results.measure(bundle, case, effort)
        if file.exists():
            seen.append(read(file))
            raise KeyboardInterrupt
        return results.measure(bundle, case, effort)

    monkeypatch.setattr(session, "measure", measure)
    flags = ("--batch", "1", "--context", "20,24", "--drafts", "0", "--decode-only")
    assert main([str(mtp_bundle), *QUICK, *flags, "--json", str(file)]) == 130
    assert [each["state"] for each in seen] == ["running"] and len(seen[0]["decode"]) == 1
    found = read(file)
    assert (found["state"], found["ended_by"]) == ("interrupted", "interrupted by the user")
    assert found["decode"] == seen[0]["decode"]
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == "not complete: interrupted by the user"
    assert err.splitlines()[-1] == "qwen4exp-bench: interrupted"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_failing_case_does_not_lose_the_others(
    mtp_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def measure(bundle: Any, case: Any, effort: Any) -> Any:
        if case == DecodeCase(2, 20):
            raise RuntimeError(f"CUDA error in\n{mtp_bundle.resolve()}/kernels of {Path.home()}/x")
        return results.measure(bundle, case, effort)

    monkeypatch.setattr(session, "measure", measure)
    flags = ("--batch", "1,2,4", "--context", "20", "--drafts", "0", "--decode-only", "--json", str(tmp_path / "f"))
    assert main([str(mtp_bundle), *QUICK, *flags]) == 1
    found = read(tmp_path / "f")
    assert [row["case"]["batch"] for row in found["decode"]] == [1, 4]
    reason = f"RuntimeError: CUDA error in {mtp_bundle.name}/kernels of ~/x"
    (failed,) = found["failed"]
    assert (failed["what"], failed["reason"]) == ("decode of 2 x 20 tokens", reason)
    files = [frame.split(":")[0] for frame in failed["where"]]
    assert files == ["runtime/bench/session.py", "tests/runtime/bench/test_session.py"]
    assert found["state"] == "complete"
    assert f"failed: decode of 2 x 20 tokens: {reason}" in capsys.readouterr().out


def test_nothing_is_measured_behind_a_lost_gpu(
    mtp_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(bundle: Any, case: Any, effort: Any) -> Any:
        raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(session, "measure", measure)
    monkeypatch.setattr(session, "is_lost", lambda device: True)
    flags = ("--batch", "1,2", "--context", "20", "--drafts", "0", "--decode-only", "--json", str(tmp_path / "f"))
    assert main([str(mtp_bundle), *QUICK, *flags]) == 1
    found = read(tmp_path / "f")
    assert len(found["failed"]) == 1
    reason = "the GPU was lost by the decode of 1 x 20 tokens"
    assert found["left_out"] == [{"what": "decode of 2 x 20 tokens", "reason": reason}]


def test_logits_that_are_not_finite_end_the_run_before_anything_is_timed(
    mtp_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    score = EngineCore.score

    def damaged(self: EngineCore, token_ids: Any) -> Any:
        logits = copy.copy(score(self, token_ids))
        logits[7, 3] = float("nan")
        return logits

    monkeypatch.setattr(EngineCore, "score", damaged)
    assert main([str(mtp_bundle), *QUICK, "--json", str(tmp_path / "f")]) == 2
    found = read(tmp_path / "f")
    assert found["state"] == "failed" and found["decode"] == []
    assert any(frame.startswith("runtime/bench/checks.py:") for frame in found["ended_where"])
    assert "the logits behind token 7 of a prompt of random ids are not finite" in found["ended_by"]
    out, err = capsys.readouterr()
    assert out == "" and "are not finite" in err.splitlines()[-1]


def test_what_does_not_fit_the_pages_is_named(mtp_bundle: Path, tmp_path: Path) -> None:
    flags = ("--batch", "1,4", "--context", "20", "--drafts", "0", "--decode-only", "--num-blocks", "15")
    assert main([str(mtp_bundle), *QUICK, *flags, "--json", str(tmp_path / "f")]) == 0
    found = read(tmp_path / "f")
    assert [row["case"]["batch"] for row in found["decode"]] == [1]
    (left_out,) = found["left_out"]
    assert left_out["what"] == "decode of 4 x 20 tokens"
    assert left_out["reason"] == "takes 20 pages of 8 tokens, and there is memory for 15"


def test_bundle_without_weights(tmp_path: Path, mtp_bundle: Path, capsys: Capture) -> None:
    bundle = shutil.copytree(mtp_bundle, tmp_path / "bundle")
    manifest = read(bundle / "manifest.json") | {"checkpoint": None}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    flags = ("--batch", "1", "--context", "20", "--drafts", "0", "--decode-only", "--json", str(tmp_path / "f"))
    assert main([str(bundle), *QUICK, *flags]) == 2
    assert "build it from the checkpoint, or measure it with --random-weights" in capsys.readouterr().err
    assert not (tmp_path / "f").exists()
    assert main([str(bundle), *QUICK, *flags, "--random-weights", "5"]) == 0
    found = read(tmp_path / "f")
    assert found["load"]["weights"] == "random, seed 5" and found["options"]["random_weights"] == 5
    assert found["bundle"]["checkpoint"] is None and len(found["decode"]) == 1
