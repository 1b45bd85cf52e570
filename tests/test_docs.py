"""README and docs/ name what there is: links, headings, files, commands with their flags, names of the code, extras and
make targets; and their tables have every op, its tolerance and every pass."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from source_tree import PACKAGES, ROOT

from qwen4exp_trt.builder.__main__ import main as build
from qwen4exp_trt.passes.look_up_ngram_rows import look_up_ngram_rows
from qwen4exp_trt.passes.pipeline import Quantization, make_pipeline
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.runtime.specs import PleResidency

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "demo").glob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8") if (ROOT / "README.md").exists() else ""
pytestmark = pytest.mark.skipif(not README, reason="a copy of the code alone has no README.md")

SOURCES = (".py", ".cu", ".cuh", ".h", ".js")
FOLDERS = (*PACKAGES, "tests", "benchmarks", "tools", "demo", "docs")
OF_OTHERS = {"polygraphy.md"}
"""Pages whose bare flags are those of another program."""
NAMES_OF_OTHERS = {"dgx_spark.md", "serving.md"}
"""Pages with names of packages, and of the server's API, which tests/serve holds against the server."""
OF_THE_READER = {"inputs.py", "kernel.cu", "launch.py", "op.py", "reference.py", "cases.py"}
"""Files that a page tells to write, or that every plugin has."""

page = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)


def without_blocks(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def headings(text: str) -> set[str]:
    """Their anchors, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", without_blocks(text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def code_spans(text: str) -> list[str]:
    return re.findall(r"(?<!`)`([^`\n]+)`(?!`)", without_blocks(text))


@cache
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@cache
def options_of(command: str) -> dict[str, set[str]]:
    """The flags that ``command --help`` lists and the values that each can have; empty where it can have any."""
    module, _, function = project()["scripts"][command].partition(":")
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        getattr(importlib.import_module(module), function)(["--help"])
    options: dict[str, set[str]] = defaultdict(set)
    for flag, values in re.findall(r"(--[a-z][\w-]*)(?:\s+\{([^}]*)\})?", printed.getvalue()):
        options[flag] |= {value.strip() for value in values.split(",") if values}
    return options


@cache
def all_options() -> dict[str, set[str]]:
    """Those of all commands."""
    merged: dict[str, set[str]] = defaultdict(set)
    for command in project()["scripts"]:
        for flag, values in options_of(command).items():
            merged[flag] |= values
    return merged


def uses(text: str) -> list[tuple[str, str]]:
    """Each flag in ``text``, and the word behind it."""
    return re.findall(r"(?<![\w-])(--[a-z][\w-]*)(?:[ =]([\w.-]+))?", text)


def mistakes(text: str, options: dict[str, set[str]]) -> list[str]:
    """What in ``text`` is no flag, or no value of one; upper case stands for any value."""
    wrong = []
    for flag, value in uses(text):
        if flag not in options:
            wrong.append(flag)
        elif options[flag] and value and value.islower() and value not in options[flag]:
            wrong.append(f"{flag} {value}")
    return wrong


def calls(text: str) -> Iterator[tuple[str, str]]:
    """Each command of ours in ``text`` and its arguments, up to the end of the line, the pipe or the substitution."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"[|;&)`]|\$\(", line):
            if found := re.search(r"(qwen4exp-(?!trt)[a-z]+)(.*)", part):
                yield found[1], found[2]


@cache
def words_of_the_source() -> frozenset[str]:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in SOURCES]
    texts = [path.read_text(encoding="utf-8") for path in (*files, ROOT / "Makefile", ROOT / "pyproject.toml")]
    return frozenset().union(*(re.findall(r"\w+", text) for text in texts))


@page
def test_links_lead_somewhere(page: Path) -> None:
    text, broken = page.read_text(encoding="utf-8"), []
    for target in re.findall(r"\]\(([^)\s]+)\)", without_blocks(text)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in headings(file.read_text(encoding="utf-8"))):
            broken.append(target)
    assert broken == []


@page
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    names = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    missing = []
    for code in (*code_spans(text), *re.findall(r"^```.*?^```", text, re.DOTALL | re.MULTILINE)):
        paths = re.findall(rf"(?<![\w./-])(?:{'|'.join(FOLDERS)})/[\w./-]+(?![\w./<*-])", code)
        missing += [path for path in paths if not (ROOT / path).exists()]
        if re.fullmatch(r"[\w-]+\.(py|cu|cuh|h)", code) and code not in names | OF_THE_READER:
            missing.append(code)
    assert missing == []


@page
def test_names_in_code_are_in_the_source(page: Path) -> None:
    if page.name in NAMES_OF_OTHERS:
        return
    spans = code_spans(page.read_text(encoding="utf-8"))
    names = [span for span in spans if re.fullmatch(r"[A-Za-z][\w.]*(\(.*\)|=.*)?", span)]
    words = [word for name in names for word in re.findall(r"[A-Za-z]\w+", re.split(r"[(=]", name)[0])]
    assert [word for word in words if word not in words_of_the_source()] == []


@page
def test_commands_have_the_flags_that_are_shown(page: Path) -> None:
    wrong = []
    for command, arguments in calls(page.read_text(encoding="utf-8")):
        if command not in project()["scripts"]:
            wrong.append(command)
        elif command != "qwen4exp-polygraphy":  # which hands flags over
            wrong += [f"{command} {mistake}" for mistake in mistakes(arguments, options_of(command))]
    assert wrong == []


@page
def test_flags_by_themselves_are_of_some_command(page: Path) -> None:
    if page.name not in OF_OTHERS:
        spans = [span for span in code_spans(page.read_text(encoding="utf-8")) if span.startswith("--")]
        assert [mistake for span in spans for mistake in mistakes(span, all_options())] == []


@page
def test_extras_and_make_targets_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    extras = {extra for extras in re.findall(r"(?:qwen4exp-trt|'\.)\[([\w,-]+)\]", text) for extra in extras.split(",")}
    targets = set(re.findall(r"(?:^|(?<!`)`)make ([a-z-]+)", text, re.MULTILINE))
    makefile = (ROOT / "Makefile").read_text()
    assert extras <= set(project()["optional-dependencies"])
    assert targets <= set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_every_command_and_page_is_in_the_readme() -> None:
    assert set(project()["scripts"]) <= set(re.findall(r"qwen4exp-[a-z]+", README))
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= set(
        re.findall(r"\]\((docs/\w+\.md)", README)
    )


def first_columns(page: str, heading: str) -> set[str]:
    """The names in the first column of the tables below ``heading``."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\|([^|]*)\|", section, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_tables_have_every_op_and_pass() -> None:
    ops = set(all_specs())
    passes = {step.name for step in make_pipeline(Quantization(), PleResidency.DISK)}
    assert look_up_ngram_rows.name in passes
    assert first_columns("architecture.md", "Ops") == ops
    assert first_columns("numerics.md", "Where it is rounded") == ops
    assert first_columns("architecture.md", "Passes") == passes


@pytest.mark.slow
def test_the_plan_that_is_shown_is_the_plan(capsys: pytest.CaptureFixture[str]) -> None:
    shown = re.search(r"^\$ qwen4exp-build CHECKPOINT (--plan.*)\n((?:.*\n)*?)```", README, re.MULTILINE)
    assert shown
    assert build([str(ROOT / "tests" / "fixtures" / "released_config.json"), *shown[1].split()]) == 0
    planned = capsys.readouterr().out.splitlines()
    assert [line for line in shown[2].splitlines() if line.strip() != "..." and line not in planned] == []


def number(text: str) -> float:
    """``3e-3`` or ``2^-8``."""
    base, _, exponent = text.partition("^")
    return float(base) ** float(exponent or 1)


def test_tolerances_of_the_ops_are_the_documented_ones() -> None:
    text = (ROOT / "docs" / "numerics.md").read_text(encoding="utf-8")
    rows = [row for row in text.splitlines() if re.match(r"\| `\w+`.*\|[^|`]*\|[^|`]*\|$", row)]
    documented = {}
    for row in rows:
        names, float32, bfloat16 = row.strip("|").split("|")[-3:]
        bounds = {torch.float32: float32, torch.bfloat16: bfloat16}
        values = {dtype: number(bound) for dtype, bound in bounds.items() if bound.strip()}
        documented |= dict.fromkeys(re.findall(r"`(\w+)`", names), values)
    assert documented == {name: dict(spec.tolerance) for name, spec in all_specs().items() if spec.tolerance}
