"""The commands of docs/ print what the pages show: each is run as it stands there, on the demo's bundles."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import bundles
import pytest
from source_tree import ROOT

from qwen4exp_trt.builder.__main__ import main as build
from qwen4exp_trt.builder.polygraphy_command import USE_RTX

PAGES = ("inspection.md", "polygraphy.md")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.trt,
    pytest.mark.time_limit(600),
    pytest.mark.skipif(not (ROOT / "docs").exists(), reason="a copy of the code alone has no docs/"),
]


def blocks(page: str, fence: str) -> list[str]:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return [block for kind, block in re.findall(r"^```(.*)\n((?:.*\n)*?)```", text, re.MULTILINE) if kind == fence]


def shown(page: str) -> list[tuple[str, list[str]]]:
    """The commands of ``page`` behind a ``$`` and the lines that are shown below each."""
    found = []
    for block in blocks(page, ""):
        if match := re.match(r"\$ ((?:.*\\\n)*.*)\n((?:.*\n)*)", block):
            found.append((match[1], match[2].splitlines()))
    return found


def not_printed(lines: list[str], printed: list[str]) -> list[str]:
    """Of ``lines`` those that ``printed`` does not have in this order; dots stand for anything."""
    missing, place = [], 0
    for line in lines:
        pattern = re.compile(re.escape(line.rstrip()).replace(r"\.\.\.", ".*"))
        if line.strip() in ("", "..."):
            continue
        places = [i for i in range(place, len(printed)) if pattern.fullmatch(printed[i].rstrip())]
        missing += [] if places else [line]
        place = places[0] + 1 if places else place
    return missing


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundles that the pages name, the file that they tell to write, and the commands."""
    folder = tmp_path_factory.mktemp("shown")
    for name, options in (("demo", ()), ("demo-nvfp4", ("--precision", "nvfp4"))):
        assert build([str(bundles.DEMO_CHECKPOINT), "-o", str(folder / "build" / name), *options]) == 0
    (folder / "inputs.py").write_text(blocks("polygraphy.md", "python")[0])
    (folder / "bin").mkdir()
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for name, target in scripts.items():
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -m {target.partition(":")[0]} "$@"\n')
        script.chmod(0o755)
    return folder


@pytest.mark.parametrize("page", PAGES)
def test_commands_print_what_is_shown(page: str, place: Path) -> None:
    commands, wrong = shown(page), {}
    assert len(commands) > 1
    for command, lines in commands:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=place,
            env={**os.environ, USE_RTX: "1", "PATH": f"{place / 'bin'}:{os.environ['PATH']}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        printed = re.sub(r"\x1b\[[\d;]*m", "", done.stdout).replace(f"{place}/", "").splitlines()
        if missing := not_printed(lines, printed):
            wrong[command] = missing
    assert wrong == {}
