"""One line on stderr that says how far a long task is."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with how much of a long task is done, and how much there is, in a unit of its own."""

_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_UPDATES = 0.1


class ProgressLine:
    """A line that a terminal rewrites; elsewhere a line now and then, and one at the end.

    ``describe``: (done, total) -> the text in front of the times. ``quiet_seconds``: a task that is done by then shows
    nothing.
    """

    def __init__(self, describe: Callable[[int, int], str], quiet_seconds: float = 0.0) -> None:
        self._describe, self._quiet_seconds = describe, quiet_seconds
        self._begin = self._last = time.monotonic()
        self.is_shown = False

    def show(self, done: int, total: int) -> None:
        """``done`` of ``total``, of whatever is counted, are done; ``done`` is at least 1."""
        now, is_terminal = time.monotonic(), sys.stderr.isatty()
        seconds, is_end = now - self._begin, done == total
        if not self.is_shown and seconds < self._quiet_seconds:
            return
        pause = _SECONDS_BETWEEN_UPDATES if is_terminal else _SECONDS_BETWEEN_LINES
        if not is_end and now - self._last < pause:
            return
        self._last, self.is_shown = now, True
        left = seconds / done * (total - done)
        line = f"{self._describe(done, total)}, {seconds:.0f} s, {left:.0f} s left"
        print(
            f"\r{line}\033[K" if is_terminal else line,
            end="\n" if not is_terminal or is_end else "",
            file=sys.stderr,
            flush=True,
        )


def loading_line() -> ProgressLine:
    """For the bytes of a bundle's weights."""
    return ProgressLine(lambda done, total: f"loaded {done / 2**30:.1f} of {total / 2**30:.1f} GiB", quiet_seconds=2.0)
