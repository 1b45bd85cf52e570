"""Holds what a step of a build needs against the memory of this machine: running out of it ends the process."""

from __future__ import annotations

from pathlib import Path

from qwen4exp_trt.errors import BuildError


def check_memory(needed: int, what: str, advice: str) -> None:
    """`BuildError` if ``what`` needs more bytes than the kernel could hand out."""
    available = available_memory()
    if needed > available:
        raise BuildError(
            f"{what} needs about {needed / 2**30:.0f} GiB of memory for this model, {available / 2**30:.0f} GiB are "
            f"available; {advice}"
        )


def available_memory() -> int:
    """Bytes, by /proc/meminfo."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
