"""Rules of the repository that no linter holds."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from source_tree import PACKAGES, ROOT, parse, source_files

MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60

MAY_IMPORT: dict[str, set[str]] = {
    "plugins": set(),
    "runtime": {"plugins"},
    "frontend": {"plugins", "runtime"},
    "passes": {"plugins", "runtime"},
    "builder": {"plugins", "runtime", "frontend", "passes"},
}
"""Which packages of ours each one may import, besides itself and the modules of the root."""

ONLY_IN = {
    "torch.export": {"frontend"},
    "onnx": {"builder"},
    "onnx_graphsurgeon": {"builder"},
    "transformers": set(),
    **{name: {"runtime"} for name in ("fastapi", "starlette", "uvicorn", "pydantic", "prometheus_client")},
}
"""Which packages may import a third party's."""

ROOT_MODULES = {"errors", "__version__"}
PLUGIN_FILES = {"__init__.py", "op.py", "reference.py", "cases.py", "README.md"}
PLUGIN_FOLDERS = sorted(path.parent for path in (ROOT / "plugins").glob("*/__init__.py"))


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Every module or name that a file imports, as a dotted path, with its line."""
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{'.' * node.level}{node.module or ''}.{a.name}") for a in node.names)


def test_files_and_functions_are_short() -> None:
    too_long = []
    for path in source_files(*PACKAGES, "tools", "benchmarks"):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            too_long.append(f"{relative(path)}: {lines} lines")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    too_long.append(f"{relative(path)}:{node.lineno}: {node.name} has {length} lines")
    assert too_long == []


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_import_only_what_is_below_them(package: str) -> None:
    allowed = MAY_IMPORT[package] | {package} | ROOT_MODULES
    wrong = []
    for path in source_files(package):
        for line, name in imports_of(path):
            first, _, rest = name.partition(".")
            if first == "" or (first == "qwen4exp_trt" and rest.partition(".")[0] not in allowed):
                wrong.append(f"{relative(path)}:{line}: {name}")
    assert wrong == []


@pytest.mark.parametrize("package", PACKAGES)
def test_third_parties_stay_in_their_package(package: str) -> None:
    forbidden = [module for module, packages in ONLY_IN.items() if package not in packages]
    wrong = [
        f"{relative(path)}:{line}: {name}"
        for path in source_files(package)
        for line, name in imports_of(path)
        if any(f"{name}.".startswith(f"{module}.") for module in forbidden)
    ]
    assert wrong == []


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a fresh interpreter from the repository's root."""
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_runtime_loads_nothing_of_the_compiler() -> None:
    result = run_python("import sys, qwen4exp_trt.runtime; print(*sys.modules)")
    assert result.returncode == 0, result.stderr
    above = ("qwen4exp_trt.frontend", "qwen4exp_trt.passes", "qwen4exp_trt.builder")
    of_extras = ("tensorrt", "tensorrt_rtx", "onnx_graphsurgeon", "fastapi", "uvicorn", "prometheus_client")
    unwanted = (*above, *of_extras, "onnx", "transformers")
    loaded = [name for name in result.stdout.split() if any(f"{name}.".startswith(f"{u}.") for u in unwanted)]
    assert loaded == []


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_cannot_be_imported_under_a_second_name(package: str) -> None:
    """From the repository's root Python would find the folder itself and make a second copy of every module."""
    result = run_python(f"import {package}")
    assert result.stderr.splitlines()[-1].startswith(f"ImportError: import qwen4exp_trt.{package}:")


def test_nothing_imports_a_package_under_its_bare_name() -> None:
    wrong = [
        f"{relative(path)}:{line}: {name}"
        for path in source_files(*PACKAGES, "tools", "benchmarks", "tests")
        for line, name in imports_of(path)
        if name.partition(".")[0] in PACKAGES
    ]
    assert wrong == []


def test_every_package_is_linked_into_the_import_package() -> None:
    links = {path.name: path.resolve() for path in (ROOT / "src" / "qwen4exp_trt").iterdir() if path.is_symlink()}
    assert links == {package: ROOT / package for package in PACKAGES}


@pytest.mark.parametrize("folder", PLUGIN_FOLDERS, ids=lambda path: path.name)
def test_plugin_folders_are_complete(folder: Path) -> None:
    assert {path.name for path in folder.iterdir() if path.is_file()} >= PLUGIN_FILES
    readme = (folder / "README.md").read_text(encoding="utf-8").splitlines()
    assert readme[0] == f"# q4e::{folder.name}"
    assert 8 <= len(readme) <= 40
    assert max(map(len, readme)) <= 120


def test_unwritten_memory_is_nan_in_tests() -> None:
    """A read of what `torch.empty` gave to our package would else depend on what was there before."""
    for call in ("torch.empty(3)", "torch.empty_like(torch.ones(3))"):
        ours = eval(call, {"torch": torch, "__name__": "qwen4exp_trt.plugins.some"})
        assert ours.isnan().all()
        assert not torch.equal(eval(call, {"torch": torch, "__name__": "elsewhere"}), ours)
    assert eval("torch.empty(3, dtype=torch.int32)", {"torch": torch, "__name__": "qwen4exp_trt.x"}).shape == (3,)
