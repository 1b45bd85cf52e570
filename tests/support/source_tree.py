"""The source files of the repository, and what their syntax trees say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("frontend", "passes", "plugins", "builder", "runtime")


def source_files(*folders: str) -> list[Path]:
    """The Python files below top-level folders, which must have some."""
    found = {folder: sorted((ROOT / folder).rglob("*.py")) for folder in folders}
    assert all(found.values()), [folder for folder, files in found.items() if not files]
    return [path for files in found.values() for path in files]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def string_literals(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a module but its docstrings, with their lines."""
    tree = parse(path)
    documentation = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in documentation:
            yield node.lineno, node.value
