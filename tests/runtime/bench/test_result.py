"""The file of a run of everything, over engines that the simulator executes: the dry run of what happens on a GB10."""

from __future__ import annotations

import copy
import json
import platform
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import bundles
import pytest

from qwen4exp_trt.runtime.bench.checks import Agreement, Checked
from qwen4exp_trt.runtime.bench.document import Document, plain
from qwen4exp_trt.runtime.bench.environment import CHECKOUT
from qwen4exp_trt.runtime.bench.tables import tables

from .conftest import run_over_the_simulator

pytestmark = pytest.mark.trt


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With stand-ins for the engines of a model and its draft head."""
    base = tmp_path_factory.getbasetemp()
    return bundles.build_with_stand_in(bundles.mtp_checkpoint(base), base / "bench-engines", max_batch_size=2)


@pytest.fixture(scope="module")
def measured(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("bench") / "result.json"
    run_over_the_simulator(bundle, file)
    return json.loads(file.read_text())


SPREAD = {"median", "p10", "p90", "least", "most", "count"}
AGREEMENT = {"tokens", "equal_tokens", "logits_error", "decode_logits_error", "largest_margin"}
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


def test_fields_are_those_of_the_schema(measured: dict[str, Any]) -> None:
    """A change here is one of ``SCHEMA_VERSION`` and of docs/bench.md."""
    assert (measured["schema"], measured["schema_version"]) == ("qwen4exp-bench", 2)
    assert measured.keys() == FIELDS.keys()
    for name, expected in FIELDS.items():
        values = measured[name] if isinstance(measured[name], list) else [measured[name]]
        for value in values if expected is not None else []:
            assert value.keys() == expected, name
    for row in measured["decode"] + measured["prefill"]:
        assert row["floor"].keys() == FLOOR
    assert all(row["step_ms"].keys() == SPREAD for row in measured["decode"])
    assert measured["checked"]["agreement"].keys() == AGREEMENT


def test_every_field_is_documented(measured: dict[str, Any]) -> None:
    text = (CHECKOUT / "docs" / "bench.md").read_text(encoding="utf-8")
    names = set(FIELDS) | {name for names in FIELDS.values() for name in names or ()} | SPREAD | FLOOR | AGREEMENT
    assert [name for name in sorted(names) if f"`{name}`" not in text] == []


def test_everything_is_measured(measured: dict[str, Any]) -> None:
    """Steps of a full batch, with drafts of nobody and of the draft head; prompts in chunks."""
    assert (measured["state"], measured["ended_by"], measured["failed"]) == ("complete", None, [])
    decode = [tuple(row["case"].values()) for row in measured["decode"]]
    assert decode == [(2, 20, "plain", 0), (2, 20, "verify", 2), (2, 20, "draft", 2)]
    assert [row["case"]["prompt"] for row in measured["prefill"]] == [5, 20]
    assert [row["chunks"] for row in measured["prefill"]] == [[5], [8, 8, 4]]
    generate = [tuple(row["case"].values()) for row in measured["generate"]]
    assert generate == [(2, 8, 8, False), (2, 8, 8, True)]
    small = pytest.approx(0, abs=1e-6)
    agreement = asdict(Agreement(16, 16, small, small, None))
    assert measured["checked"] == {"finite_logits": 47, "agreement": agreement}
    for row in measured["decode"]:
        case = row["case"]
        assert row["step_ms"]["count"] == 2 and row["first_step_ms"] > 0
        assert case["batch"] <= row["tokens_per_step"] <= case["batch"] * (case["drafts"] + 1)
        assert row["tokens_per_second"] == pytest.approx(1e3 * case["batch"] / row["step_ms"]["median"])
        assert row["device"] is None and row["host_ms"] is None, "there is no GPU"
    for row in measured["decode"] + measured["prefill"]:
        floor, time = row["floor"], row.get("step_ms") or row["first_token_ms"]
        assert floor["published_ms"] is None and row["share_of_roofline"]["published"] is None
        assert row["share_of_roofline"]["measured"] == pytest.approx(floor["measured_ms"] / time["median"])
    assert all((row["accepted_drafts"] is not None) == row["case"]["with_drafts"] for row in measured["generate"])


def test_it_tells_of_the_engines(measured: dict[str, Any]) -> None:
    """Of the model and the draft head."""
    load = measured["load"]
    assert (load["backend"], load["cuda_graphs"], load["speculate"]) == ("tensorrt-rtx", "own", "mtp:3")
    assert load["prepared_steps"]["shapes"] >= 3 and load["prepared_steps"]["seconds"] > 0
    assert len(load["engines"]) == 2
    for engine in load["engines"]:
        assert engine["tensorrt"].startswith("tensorrt_rtx ")
        assert engine["deserialize_seconds"] > 0 and engine["context_seconds"] > 0
        assert engine["jit_cache"] == {"is_hit": False, "bytes": 0}


def test_it_tells_no_paths_and_no_names(measured: dict[str, Any], bundle: Path) -> None:
    text = json.dumps(measured)
    assert measured["bundle"]["name"] == bundle.name
    for secret in (str(bundle.parent), str(Path.home()) + "/", platform.node(), str(CHECKOUT)):
        assert secret not in text


TIMES = {"median": 23.456, "p10": 23.0, "p90": 24.0, "least": 22.5, "most": 30.0, "count": 60}
DEVICE = {"step_ms": TIMES | {"median": 22.2}, "enqueue_ms": TIMES | {"median": 0.31}}
SENSORS = {
    "samples": 9,
    "sm_clock_mhz": TIMES | {"least": 2100.0, "most": 2418.0},
    "throttled_by": ["software power cap"],
    "absent": {"power_watts": "nvidia-smi says [N/A]"},
}


@pytest.fixture
def document(measured: dict[str, Any]) -> Document:
    """As of a CPU."""
    names = {field.name for field in fields(Document)}
    return Document(**{name: copy.deepcopy(value) for name, value in measured.items() if name in names})


def columns(lines: list[str], title: str) -> list[dict[str, str]]:
    """The rows of a table by the names of its columns."""
    start = lines.index(title) + 1
    end = next((i for i, line in enumerate(lines) if i > start and not line), len(lines))
    names = [name.strip() for name in lines[start].split("  ") if name.strip()]
    return [dict(zip(names, line.split(), strict=True)) for line in lines[start + 1 : end]]


def test_rows_are_what_was_measured(document: Document) -> None:
    lines = list(tables(document))
    decode = columns(lines, "decode")
    assert len(decode) == len(document.decode)
    for shown, row in zip(decode, document.decode, strict=True):
        assert (shown["kind"], shown["batch"]) == (row["case"]["kind"], str(row["case"]["batch"]))
        assert shown["step ms"] == f"{row['step_ms']['median']:,.2f}"
        assert float(shown["x floor"].replace(",", "")) == pytest.approx(
            row["step_ms"]["median"] / row["floor"]["measured_ms"], rel=0.01
        )
        assert shown["device ms"] == shown["host ms"] == shown["x published"] == "-"
    assert [row["chunks"] for row in columns(lines, "prefill")] == ["1", "3"]
    assert [row["drafts"] for row in columns(lines, "generate")] == ["no", "yes"]


def test_rows_of_a_gpu_have_its_times_and_the_published_floor(document: Document) -> None:
    row = document.decode[0]
    row |= {"step_ms": TIMES, "device": DEVICE, "host_ms": 1.256, "sensors": SENSORS}
    row["share_of_roofline"] = {"published": 0.8, "measured": 0.9}
    lines = list(tables(document))
    shown = columns(lines, "decode")[0]
    expected = {
        "step ms": "23.46",
        "spread": "4.3%",
        "steps": "60",
        "device ms": "22.20",
        "enqueue ms": "0.31",
        "host ms": "1.26",
        "x floor": "1.11",
        "x published": "1.25",
    }
    assert {name: shown[name] for name in expected} == expected
    assert "GPU: 2100 to 2418 MHz; clocks held down by: software power cap" in lines


def test_what_executed_the_bundle_is_told(document: Document) -> None:
    lines = list(tables(document))
    assert lines[0].startswith("bench-engines: precision checkpoint, n-gram table checkpoint, on ")
    trt = document.load["engines"][0]["tensorrt"]
    assert f"executed by tensorrt-rtx, {trt}, on cpu; CUDA graphs: own" in lines
    document.load |= {"backend": "eager", "engines": [], "device": "cuda", "cuda_graphs": "none"}
    assert "executed by eager, on cuda; CUDA graphs: none" in list(tables(document))


def test_what_is_missing_is_named(document: Document) -> None:
    document.state, document.ended_by = "failed", "the disk is full"
    document.left_out = [{"what": "prefill of 9 tokens", "reason": "too long"}]
    document.failed = [{"what": "decode of 1 x 2 tokens", "reason": "no memory"}]
    assert list(tables(document))[-3:] == [
        "not measured: prefill of 9 tokens: too long",
        "failed: decode of 1 x 2 tokens: no memory",
        "not complete: the disk is full",
    ]


@pytest.mark.parametrize(
    ("agreement", "shown"),
    [
        (None, ""),
        (Agreement(16, 16, 0.0123, 0.021, None), "; 16 of 16 tokens as op by op, logits within 1.23e-02 of its, {}"),
        (
            Agreement(16, 15, 0.0123, 0.021, 2.345),
            "; 15 of 16 tokens as op by op, logits within 1.23e-02 of its, {}; "
            "tokens that differ are within 2.3 RMS of the differences of logits",
        ),
        (Agreement(1, 1, 0.0123, None, None), "; 1 of 1 tokens as op by op, logits within 1.23e-02 of its"),
    ],
)
def test_agreement_is_shown(document: Document, agreement: Agreement | None, shown: str) -> None:
    document.checked = plain(Checked(48, agreement))
    expected = f"checked 48 rows of logits: finite{shown.format('2.10e-02 in decode steps')}"
    assert [line for line in tables(document) if line.startswith("checked")] == [expected]
