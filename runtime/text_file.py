"""Text files that a user gives."""

from __future__ import annotations

from pathlib import Path

from qwen4exp_trt.errors import Q4eError


def read_text(path: Path, error_class: type[Q4eError]) -> str:
    """The whole text; ``error_class`` for a file that cannot be read or is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise error_class(f"{path}: cannot read the text: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise error_class(f"{path}: the text is not UTF-8: {error}") from error
