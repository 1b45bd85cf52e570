"""What is printed: a document in words and columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qwen4exp_trt.runtime.bench.document import COMPLETE, Document

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]

_ABSENT = "-"
_NOTES = """step: in the serving loop, until the tokens are on the host; device: the GPU alone, steps back to back
enqueue: the host's part of a step that it does not wait for; host: what a step takes beside the device
floor: the bytes of weights and states, or the products, at the rates measured above; x floor: step over it
x published: step over the floor at the published rates; spread: p10 to p90, as a share of the median"""


def tables(document: Document) -> Iterator[str]:
    """Lines."""
    yield from _head(document)
    for title, rows, columns in (
        ("decode", document.decode, _DECODE),
        ("prefill", document.prefill, _PREFILL),
        ("generate", document.generate, _GENERATE),
    ):
        if rows:
            yield ""
            yield from _table(title, rows, columns)
    if document.decode or document.prefill:
        yield ""
        yield _NOTES
    for title, missing in (("not measured", document.left_out), ("failed", document.failed)):
        for each in missing:
            yield f"{title}: {each['what']}: {each['reason']}"
    if document.state != COMPLETE:
        yield f"not complete: {document.ended_by}"


def _head(document: Document) -> Iterator[str]:
    bundle, load, rates, gpu = document.bundle, document.load, document.rates, document.environment.get("gpu")
    where = " ".join(document.environment["cpu"]["models"]) if gpu is None else gpu["name"]
    formats = f"precision {bundle['precision']}, n-gram table {bundle['ple_precision']}"
    yield f"{bundle['name']}: {formats}, on {where or 'a CPU'}"
    if rates:
        copy, read = rates["copy_bytes_per_second"] / 1e9, rates["read_bytes_per_second"] / 1e9
        products = rates["matmul_flops"] / 1e12
        line = f"measured {copy:,.1f} GB/s in a copy, {read:,.1f} in a read, {products:,.2f} TFLOP/s in BF16 products"
        published = rates["published"]
        if published is not None:
            line += f"; published {published['bytes_per_second'] / 1e9:,.0f} GB/s"
        yield line
    if load:
        size, engines = load["weight_bytes"] / 2**30, load["engines"]
        runner = f"{load['backend']}, {engines[0]['tensorrt']}" if engines else load["backend"]
        yield f"loaded {size:,.2f} GiB of weights ({load['weights']}) in {load['seconds']:,.1f} s"
        yield f"executed by {runner}, on {load['device']}; CUDA graphs: {load['cuda_graphs']}"
    if (checked := document.checked) is not None:
        yield f"checked {checked['finite_logits']} rows of logits: finite{_agreement(checked['agreement'])}"
    if document.generate or document.decode or document.prefill:
        yield _conditions(document)


def _agreement(agreement: Row | None) -> str:
    if agreement is None:
        return ""
    equal, count, decode, margin = (
        agreement[name] for name in ("equal_tokens", "tokens", "decode_logits_error", "largest_margin")
    )
    text = f"; {equal} of {count} tokens as op by op, logits within {agreement['logits_error']:.2e} of its"
    if decode is not None:
        text += f", {decode:.2e} in decode steps"
    if margin is not None:
        text += f"; tokens that differ are within {margin:.1f} RMS of the differences of logits"
    return text


def _conditions(document: Document) -> str:
    """Of all cases together."""
    sensors = [row["sensors"] for row in (*document.generate, *document.decode, *document.prefill)]
    throttled = sorted({name for each in sensors for name in each["throttled_by"] or ()})
    parts = []
    for name, unit in (("sm_clock_mhz", "MHz"), ("power_watts", "W"), ("temperature_c", "C")):
        found = [each[name] for each in sensors if name in each]
        if found:
            least, most = min(each["least"] for each in found), max(each["most"] for each in found)
            parts.append(f"{least:.0f} to {most:.0f} {unit}")
    if not parts:
        gpu = document.environment["gpu"]
        return "no GPU" if gpu is None else f"no samples of the GPU's sensors ({gpu['sensors']})"
    return f"GPU: {', '.join(parts)}; clocks held down by: {', '.join(throttled) or 'nothing that shows'}"


def _table(title: str, rows: list[dict[str, Any]], columns: tuple[Column, ...]) -> Iterator[str]:
    cells = [[name for name, _ in columns], *([show(row) for _, show in columns] for row in rows)]
    widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
    yield title
    for line in cells:
        yield "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))


def _case(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row['case'][name]:,}"


def _median(*path: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        spread = _at(row, *path)
        return _ABSENT if spread is None else f"{spread['median']:,.2f}"

    return show


def _number(*path: str, digits: int = 2) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        value = _at(row, *path)
        return _ABSENT if value is None else f"{value:,.{digits}f}"

    return show


def _spread(name: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        spread = row[name]
        return f"{(spread['p90'] - spread['p10']) / spread['median']:.1%}" if spread["count"] > 1 else _ABSENT

    return show


def _times_floor(name: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        share = row["share_of_roofline"][name]
        return _ABSENT if not share else f"{1 / share:,.2f}"

    return show


def _at(row: Row, *path: str) -> Any:
    value: Any = row
    for name in path:
        value = None if value is None else value[name]
    return value


def _gigabytes(row: Row) -> str:
    return f"{(row['floor']['weight_bytes'] + row['floor']['state_bytes']) / 1e9:,.3f}"


_DECODE: tuple[Column, ...] = (
    ("kind", lambda row: row["case"]["kind"]),
    ("batch", _case("batch")),
    ("context", _case("context")),
    ("drafts", _case("drafts")),
    ("step ms", _median("step_ms")),
    ("spread", _spread("step_ms")),
    ("steps", lambda row: f"{row['step_ms']['count']}"),
    ("device ms", _median("device", "step_ms")),
    ("enqueue ms", _median("device", "enqueue_ms")),
    ("host ms", _number("host_ms")),
    ("tokens/s", _number("tokens_per_second", digits=1)),
    ("a step", _number("tokens_per_step")),
    ("GB", _gigabytes),
    ("floor ms", _number("floor", "measured_ms", digits=3)),
    ("x floor", _times_floor("measured")),
    ("x published", _times_floor("published")),
)
_PREFILL: tuple[Column, ...] = (
    ("prompt", _case("prompt")),
    ("chunks", lambda row: f"{len(row['chunks'])}"),
    ("token 1 ms", _median("first_token_ms")),
    ("spread", _spread("first_token_ms")),
    ("runs", lambda row: f"{row['first_token_ms']['count']}"),
    ("tokens/s", _number("tokens_per_second", digits=1)),
    ("last chunk ms", _number("last_chunk_ms")),
    ("enqueue ms", _number("enqueue_ms")),
    ("GFLOP", lambda row: f"{row['floor']['flops'] / 1e9:,.2f}"),
    ("floor ms", _number("floor", "measured_ms", digits=3)),
    ("x floor", _times_floor("measured")),
    ("x published", _times_floor("published")),
)
_GENERATE: tuple[Column, ...] = (
    ("batch", _case("batch")),
    ("prompt", _case("prompt")),
    ("output", _case("output")),
    ("drafts", lambda row: "yes" if row["case"]["with_drafts"] else "no"),
    ("seconds", _median("seconds")),
    ("calls", lambda row: f"{row['seconds']['count']}"),
    ("tokens/s", _median("output_tokens_per_second")),
    ("token 1 ms", _median("first_token_ms")),
    ("between ms", _median("between_tokens_ms")),
    ("device ms", _median("device_step_ms")),
    ("host ms", _number("host_ms")),
    ("accepted", lambda row: _ABSENT if row["accepted_drafts"] is None else f"{row['accepted_drafts']:.1%}"),
)
