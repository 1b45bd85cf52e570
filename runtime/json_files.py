"""JSON files: those that others wrote, and results that a command writes."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from qwen4exp_trt.errors import Q4eError, RequestError


def read_json_object(path: Path, error_class: type[Q4eError]) -> dict[str, Any]:
    """The object that the file holds; ``error_class`` for a file that cannot be read or holds anything else."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise error_class(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise error_class(f"{path}: not a JSON file: {error}") from error
    if not isinstance(data, dict):
        raise error_class(f"{path}: holds a {type(data).__name__}; a JSON object was expected")
    return data


def check_file_target(path: Path, option: str) -> None:
    """`RequestError` before the work if the file of ``option``, such as ``--json``, cannot be written after it."""
    target = _target_of(path)
    try:
        if target.exists() and not target.is_file():
            raise RequestError(f"{path}: {option} writes a file, and this is something else; choose another name")
        tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise RequestError(f"{path}: {option} cannot write a file there: {error.strerror}; choose another") from error


def write_text(path: Path, text: str) -> None:
    """Write the file under a temporary name first, so that it is whole or as it was.

    What is no character, of a file's name that is not UTF-8, becomes a ``?``, as on the terminal.
    """
    target = _target_of(path)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            staged = Path(folder) / "result"
            staged.write_text(text, encoding="utf-8", errors="replace")
            staged.replace(target)
    except OSError as error:
        raise RequestError(f"{path}: cannot write the result: {error.strerror}") from error


def _target_of(path: Path) -> Path:
    """Where links lead; unlike `Path.resolve`, this takes those that lead to themselves."""
    return Path(os.path.realpath(path))


def write_json(path: Path, data: Any) -> None:
    """`write_text` of ``data`` as JSON."""
    write_text(path, json.dumps(data, indent=1) + "\n")
