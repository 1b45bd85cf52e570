"""How commands refuse what they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refusal(capsys: pytest.CaptureFixture[str], prog: str, main: Callable[[list[str]], int], *argv: Any) -> str:
    """The one line on stderr of a command that exits with 2 and prints no result. Steps may be told in front of it, in
    lines that begin with their time: ``[  0.1 s]``."""
    try:
        code = main([str(arg) for arg in argv])
    except SystemExit as exit:
        code = exit.code
    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    *steps, line = err.splitlines(keepends=True)
    assert all(step.startswith("[ ") for step in steps)
    assert line.startswith(f"{prog}: error: ") and line.endswith("\n")
    return line
