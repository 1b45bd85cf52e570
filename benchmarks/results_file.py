"""Appends a measurement to ``benchmarks/results``, with the commit and machine that it belongs to."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def append_result(name: str, measured: dict[str, Any]) -> None:
    """One JSON line at the end of ``benchmarks/results/<name>.jsonl``."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    run = {
        "commit": described.stdout.strip(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpus": os.cpu_count(),
        "gpu": None,
    }
    path = ROOT / "benchmarks" / "results" / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(run | measured) + "\n")
