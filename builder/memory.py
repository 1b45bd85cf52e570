"""Holds what a step of a build needs against the memory of this machine: running out of it ends the process."""

from __future__ import annotations

from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.runtime.host_memory import available_memory


def check_memory(needed: int, what: str, advice: str) -> None:
    """`BuildError` if ``what`` needs more bytes than the kernel could hand out."""
    available = available_memory()
    if needed > available:
        raise BuildError(
            f"{what} needs about {needed / 2**30:.0f} GiB of memory for this model, {available / 2**30:.0f} GiB are "
            f"available; {advice}"
        )
