"""JSON files that others wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qwen4exp_trt.errors import Q4eError


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
