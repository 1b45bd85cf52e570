"""Runs of the command on the CPU, and the file that they leave."""

from __future__ import annotations

import copy
import json
import platform
import shutil
from pathlib import Path
from typing import Any

import bundles
import pytest

from qwen4exp_trt.runtime.bench import results, session
from qwen4exp_trt.runtime.bench.__main__ import main
from qwen4exp_trt.runtime.bench.cases import DecodeCase, PrefillCase
from qwen4exp_trt.runtime.bench.environment import CHECKOUT
from qwen4exp_trt.runtime.disk_speed import DiskSpeed
from qwen4exp_trt.runtime.engine_core import EngineCore
from qwen4exp_trt.runtime.ngram_rows import _Table

from .conftest import QUICK

Capture = pytest.CaptureFixture[str]

SPREAD = {"median", "p10", "p90", "least", "most", "count"}
FLOOR = {"weight_bytes", "state_bytes", "flops", "published_ms", "measured_ms"}
FIELDS = {
    "schema": None,
    "schema_version": None,
    "started": None,
    "options": {
        *("effort", "iterations", "warm_up", "seconds", "runs", "all_batches", "contexts", "prompts", "drafts"),
        *("to_the_longest", "least", "selection", "llm", "random_weights", "check"),
    },
    "state": None,
    "ended_by": None,
    "ended_where": None,
    "seconds": None,
    "environment": {
        *("package_version", "commit", "python", "packages", "host_name", "system", "cpu", "memory", "gpu"),
    },
    "bundle": {
        *("name", "manifest_sha256", "format_version", "package_version", "precision", "ple_precision"),
        *("ple_residency", "activation_dtype", "kv_cache_dtype", "target", "backend", "kernel_targets", "limits"),
        *("activation_bytes", "vocab_size", "draft_head_vocab_size", "config", "checkpoint", "converted", "tools"),
        "files",
    },
    "rates": {"copy_bytes_per_second", "read_bytes_per_second", "matmul_flops", "published"},
    "load": {
        *("seconds", "weights", "weight_bytes", "state_bytes", "memory", "ngram_table", "speculate", "backend"),
        *("device", "cuda_graphs", "engines", "prepared_steps", "kernels_compiled"),
    },
    "checked": {"finite_logits", "agreement"},
    "generate": {
        *("case", "seconds", "output_tokens_per_second", "first_token_ms", "between_tokens_ms", "accepted_drafts"),
        *("device_step_ms", "host_ms", "sensors"),
    },
    "decode": {
        *("case", "first_step_ms", "step_ms", "device", "tokens_per_step", "host_ms", "tokens_per_second"),
        *("tokens_per_second_if_all_accepted", "floor", "share_of_roofline", "sensors"),
    },
    "prefill": {
        *("case", "first_run_ms", "first_token_ms", "chunks", "last_chunk_ms", "enqueue_ms", "peak_bytes"),
        *("tokens_per_second", "floor", "share_of_roofline", "sensors"),
    },
    "left_out": {"what", "reason"},
    "failed": {"what", "reason", "where"},
    "memory": {"before_loading", "after_loading", "least_available_bytes", "after_the_run"},
}
"""The fields of schema version 2, and of those that are objects (or lists of them) theirs."""


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def test_fields_are_those_of_the_schema(measured: dict[str, Any]) -> None:
    """A change here is one of ``SCHEMA_VERSION`` and of docs/bench.md."""
    assert (measured["schema"], measured["schema_version"]) == ("qwen4exp-bench", 2)
    assert measured.keys() == FIELDS.keys()
    for name, fields in FIELDS.items():
        values = measured[name] if isinstance(measured[name], list) else [measured[name]]
        for value in values if fields is not None else []:
            assert value.keys() == fields, name
    for row in measured["decode"] + measured["prefill"]:
        assert row["floor"].keys() == FLOOR
    assert all(row["step_ms"].keys() == SPREAD for row in measured["decode"])


def test_every_field_is_documented(measured: dict[str, Any]) -> None:
    text = (CHECKOUT / "docs" / "bench.md").read_text(encoding="utf-8")
    names = set(FIELDS) | {field for fields in FIELDS.values() for field in fields or ()} | SPREAD | FLOOR
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def test_everything_is_measured(measured: dict[str, Any]) -> None:
    """Steps of one sequence and of a full batch, with drafts of nobody and of the draft head; prompts in chunks."""
    assert (measured["state"], measured["ended_by"], measured["failed"]) == ("complete", None, [])
    decode = [tuple(row["case"].values()) for row in measured["decode"]]
    plain = [(batch, 20, "plain", 0) for batch in (1, 4)]
    assert decode == plain + [(batch, 20, kind, 2) for batch in (1, 4) for kind in ("verify", "draft")]
    assert [row["case"]["prompt"] for row in measured["prefill"]] == [5, 20]
    assert [row["chunks"] for row in measured["prefill"]] == [[5], [8, 8, 4]]
    generate = [tuple(row["case"].values()) for row in measured["generate"]]
    assert generate == [(batch, 8, 12, drafts) for batch in (1, 4) for drafts in (False, True)]
    assert measured["checked"] == {"finite_logits": 47, "agreement": None}
    assert measured["load"]["speculate"] == "mtp:3"
    for row in measured["decode"]:
        case = row["case"]
        assert row["step_ms"]["count"] == 3 and row["first_step_ms"] > 0
        assert case["batch"] <= row["tokens_per_step"] <= case["batch"] * (case["drafts"] + 1)
        assert row["tokens_per_second"] == pytest.approx(1e3 * case["batch"] / row["step_ms"]["median"])
        assert row["device"] is None and row["host_ms"] is None, "there is no GPU"
    for row in measured["decode"] + measured["prefill"]:
        floor, time = row["floor"], row.get("step_ms") or row["first_token_ms"]
        assert floor["published_ms"] is None and row["share_of_roofline"]["published"] is None
        assert row["share_of_roofline"]["measured"] == pytest.approx(floor["measured_ms"] / time["median"])
    assert all((row["accepted_drafts"] is not None) == row["case"]["with_drafts"] for row in measured["generate"])


def test_the_file_tells_no_paths_and_no_names(measured: dict[str, Any], mtp_bundle: Path) -> None:
    text = json.dumps(measured)
    assert measured["bundle"]["name"] == mtp_bundle.name
    for secret in (str(mtp_bundle.parent), str(Path.home()) + "/", platform.node(), str(CHECKOUT)):
        assert secret not in text


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
    flags = ("--batch", "4", "--context", "20", "--drafts", "0", "--decode-only", "--num-blocks", "15")
    assert main([str(mtp_bundle), *QUICK, *flags, "--json", str(tmp_path / "f")]) == 0
    (left_out,) = read(tmp_path / "f")["left_out"]
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
