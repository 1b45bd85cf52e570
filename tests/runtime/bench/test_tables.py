from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

import pytest

from qwen4exp_trt.runtime.bench.checks import Agreement, Checked
from qwen4exp_trt.runtime.bench.document import Document, plain
from qwen4exp_trt.runtime.bench.tables import tables

SPREAD = {"median": 23.456, "p10": 23.0, "p90": 24.0, "least": 22.5, "most": 30.0, "count": 60}
DEVICE = {"step_ms": SPREAD | {"median": 22.2}, "enqueue_ms": SPREAD | {"median": 0.31}}
SENSORS = {
    "samples": 9,
    "sm_clock_mhz": SPREAD | {"least": 2100.0, "most": 2418.0},
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
    assert [row["drafts"] for row in columns(lines, "generate")] == ["no", "yes", "no", "yes"]


def test_rows_of_a_gpu_have_its_times_and_the_published_floor(document: Document) -> None:
    row = document.decode[0]
    row |= {"step_ms": SPREAD, "device": DEVICE, "host_ms": 1.256, "sensors": SENSORS}
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
    assert lines[0].startswith("tiny-mtp: precision checkpoint, n-gram table checkpoint, on ")
    assert "executed by eager, on cpu; CUDA graphs: none" in lines
    engine = {"tensorrt": "tensorrt_rtx 1.7.1.116"}
    document.load |= {"backend": "tensorrt-rtx", "engines": [engine] * 2, "device": "cuda", "cuda_graphs": "own"}
    assert "executed by tensorrt-rtx, tensorrt_rtx 1.7.1.116, on cuda; CUDA graphs: own" in list(tables(document))


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
