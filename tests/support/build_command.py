"""Runs ``qwen4exp-build`` in the process of a test."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from qwen4exp_trt.builder.__main__ import main

Capture = pytest.CaptureFixture[str]

FLOAT32 = ["--activation-dtype", "float32", "--max-seq-len", "64", "--block-size", "8", "--max-batch-size", "2"]
"""Small limits, and no engine."""

STAGES = ["config", "checkpoint", "plan", "export", "passes", "lower", "engine", "kernels", "write"]


def tree(folder: Path) -> dict[str, str]:
    """A hash of every file below ``folder``."""
    return {
        str(path.relative_to(folder)): sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in folder.rglob("*")
    }


def refused(capsys: Capture, folder: Path, *argv: Any) -> str:
    """The one line on stderr of a build that exits with 2 and leaves everything in ``folder`` as it was."""
    before = tree(folder)
    try:
        code = main([str(arg) for arg in argv])
    except SystemExit as exit:
        code = exit.code
    out, err = capsys.readouterr()
    assert code == 2
    assert err.startswith("qwen4exp-build: error: ") and err.count("\n") == 1 and err.endswith("\n")
    assert "Traceback" not in out + err
    assert not out or out.endswith("\n"), "the line of the stage has ended"
    assert tree(folder) == before
    return err
