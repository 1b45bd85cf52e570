"""README and docs/ name what there is: links, headings, files, commands with their flags, and the ops' tolerances."""

from __future__ import annotations

import contextlib
import importlib
import io
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from source_tree import PACKAGES, ROOT

from qwen4exp_trt.builder.__main__ import main as build
from qwen4exp_trt.plugins.registry import all_specs

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "demo").glob("*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8") if (ROOT / "README.md").exists() else ""
pytestmark = pytest.mark.skipif(not README, reason="a copy of the code alone has no README.md")

FOLDERS = (*PACKAGES, "tests", "benchmarks", "tools", "demo", "docs")
OF_OTHERS = {"polygraphy.md"}
"""Pages whose bare flags are those of another program."""
OF_THE_READER = {"inputs.py", "network.py", "part.onnx", "kernel.cu", "launch.py", "op.py", "reference.py", "cases.py"}
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
def flags_of(command: str) -> frozenset[str]:
    """What ``command --help`` lists."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts[command].partition(":")
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        getattr(importlib.import_module(module), function)(["--help"])
    return frozenset(re.findall(r"--[a-z][\w-]*", printed.getvalue()))


@cache
def commands() -> frozenset[str]:
    return frozenset(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"])


def calls(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of ours in ``text`` and its flags, up to the end of the line, the pipe or the substitution."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"[|;&)`]|\$\(", line):
            if found := re.search(r"(qwen4exp-(?!trt)[a-z]+)\s(.*)", part):
                yield found[1], re.findall(r"(?<![\w-])--[a-z][\w-]*", found[2])


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
    names = {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_file()}
    missing = []
    for span in code_spans(page.read_text(encoding="utf-8")):
        if re.fullmatch(rf"({'|'.join(FOLDERS)})/[\w./-]+", span):
            missing += [] if (ROOT / span).exists() else [span]
        elif re.fullmatch(r"[\w-]+\.(py|cu|cuh|h)", span):
            missing += [] if span in names | OF_THE_READER else [span]
    assert missing == []


@page
def test_commands_have_the_flags_that_are_shown(page: Path) -> None:
    wrong = []
    for command, flags in calls(page.read_text(encoding="utf-8")):
        if command not in commands():
            wrong.append(command)
        elif command != "qwen4exp-polygraphy":  # which hands flags over
            wrong += [f"{command} {flag}" for flag in flags if flag not in flags_of(command)]
    assert wrong == []


@page
def test_flags_by_themselves_are_of_some_command(page: Path) -> None:
    if page.name in OF_OTHERS:
        return
    known = frozenset().union(*map(flags_of, commands()))
    spans = [span for span in code_spans(page.read_text(encoding="utf-8")) if span.startswith("--")]
    flags = [flag for span in spans for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", span)]
    assert [flag for flag in flags if flag not in known] == []


def test_every_command_and_page_is_in_the_readme() -> None:
    assert commands() <= set(re.findall(r"qwen4exp-[a-z]+", README))
    assert {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")} <= set(
        re.findall(r"\]\((docs/\w+\.md)", README)
    )


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
