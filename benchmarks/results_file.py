"""Appends a measurement to ``benchmarks/results``, with the commit and machine that it belongs to."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from qwen4exp_trt.runtime.bench.environment import describe_commit

ROOT = Path(__file__).parents[1]


def append_result(name: str, measured: dict[str, Any]) -> None:
    """One JSON line at the end of ``benchmarks/results/<name>.jsonl``."""
    run = {
        "commit": describe_commit(ROOT, "benchmarks/results"),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpus": os.cpu_count(),
        "gpu": _gpu_name(),
    }
    path = ROOT / "benchmarks" / "results" / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(run | measured) + "\n")


def _gpu_name() -> str | None:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
