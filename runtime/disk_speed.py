"""Measures how fast rows of a table come from its disk, and warns of one that would slow down every token."""

from __future__ import annotations

import logging
import re
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qwen4exp_trt.errors import CheckpointError
from qwen4exp_trt.runtime.row_table import RowTable

logger = logging.getLogger(__name__)

MOST_TOKEN_MS = 4.0
"""Above it a token's rows are warned of: a tenth of what the rest of it takes on a GB10."""
_MOST_SECONDS = 0.5
_SECONDS_WORTH_THREADS = 1e-3
"""For a token; handing its rows to threads takes a fraction of it."""
_NUM_SINGLE_ROWS = 16
_NUM_TOKENS = 8
_PROMPT_TOKENS = 16
"""How often a row alone and the rows of a token are read, and tokens whose rows are read at once: 400 rows in all."""
_REMOTE_PREFIXES = ("nfs", "cifs", "smb", "9p", "fuse", "ceph", "lustre", "gpfs", "beegfs", "afs", "virtiofs")
"""File systems whose reads may cross a network or another process, by how the names of their types begin."""


@dataclass(frozen=True)
class DiskSpeed:
    """Reads of random rows that were not in the page cache."""

    path: str
    file_system: str
    is_remote: bool
    row_us: float
    """Of a row that is read alone."""
    token_ms: float
    """Of all rows of a token, which are read at once."""
    prompt_token_ms: float
    """Of a token of a prompt, whose rows are read with those of many others."""
    uses_threads: bool
    """Whether threads read, since what is announced to the kernel is not read ahead."""

    @property
    def is_slow(self) -> bool:
        return self.token_ms > MOST_TOKEN_MS

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def measure(tables: Sequence[RowTable], rows_per_token: int) -> DiskSpeed | None:
    """Read random rows of tables that are read together; None if they are not in files. Takes about half a second at
    most, or as long as single reads take.

    Where reading at once is not faster than one by one, threads read from now on.
    """
    paths = sorted({path for table in tables for reader in table.readers for path in reader.paths})
    if not paths:
        return None
    sample = _Sample(tables)
    alone = sample.seconds_of(1, _NUM_SINGLE_ROWS)
    token = sample.seconds_of(rows_per_token, _NUM_TOKENS)
    uses_threads = min(token) > max(_SECONDS_WORTH_THREADS, min(alone) * rows_per_token / 2)
    if uses_threads:
        for table in tables:
            for reader in table.readers:
                reader.use_threads()
        token = sample.seconds_of(rows_per_token, _NUM_TOKENS)
    (prompt,) = sample.seconds_of(_PROMPT_TOKENS * rows_per_token, 1)
    kinds = {path: file_system_of(path) for path in paths}
    remote = [path for path, kind in kinds.items() if kind.startswith(_REMOTE_PREFIXES)]
    shown = (remote or paths)[0]
    return DiskSpeed(
        path=str(shown.parent),
        file_system=kinds[shown],
        is_remote=bool(remote),
        row_us=statistics.median(alone) * 1e6,
        token_ms=statistics.median(token) * 1e3,
        prompt_token_ms=prompt / _PROMPT_TOKENS * 1e3,
        uses_threads=uses_threads,
    )


def warn(speed: DiskSpeed) -> None:
    """Log the figures, as a warning if the disk is slow or remote."""
    figures = (
        f"{speed.row_us:,.0f} us for a row, {speed.token_ms:.2f} ms for the rows of a token, "
        f"{speed.prompt_token_ms:.2f} ms for those of a token of a prompt"
    )
    where = f"the n-gram table is read from {speed.path} ({speed.file_system})"
    if speed.is_slow:
        logger.warning(
            "%s, which is slow: %s, where %g ms a token would not show; put the files on a faster disk, or build "
            "with --ple-residency device",
            where,
            figures,
            MOST_TOKEN_MS,
        )
    elif speed.is_remote:
        logger.warning("%s, which may be remote: %s now; every token will wait for it", where, figures)
    else:
        logger.info("%s: %s", where, figures)


def file_system_of(path: Path, mounts: Path = Path("/proc/mounts")) -> str:
    """The type of the file system that has ``path``, as the kernel names it; ``unknown`` if it does not say."""
    try:
        lines = [line.split() for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return "unknown"
    resolved = path.resolve()
    # A later mount hides an earlier one at the same place.
    points = [(Path(_unescaped(point)), kind) for _, point, kind, *_ in lines]
    found = [(len(point.parts), index, kind) for index, (point, kind) in enumerate(points) if _holds(point, resolved)]
    return max(found)[2] if found else "unknown"


def _holds(point: Path, path: Path) -> bool:
    return path == point or point in path.parents


def _unescaped(point: str) -> str:
    """The kernel writes a blank as ``\\040``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), point)


class _Sample:
    """Reads random rows of tables."""

    def __init__(self, tables: Sequence[RowTable]) -> None:
        self._tables, self._generator = tables, np.random.default_rng(0)
        self._end = time.perf_counter() + _MOST_SECONDS

    def seconds_of(self, count: int, rounds: int) -> list[float]:
        """Of reading ``count`` rows at once, ``rounds`` times or as often as there is time for."""
        found = [self._seconds(count)]
        while len(found) < rounds and time.perf_counter() < self._end:
            found.append(self._seconds(count))
        return found

    def _seconds(self, count: int) -> float:
        rows = np.unique(self._generator.integers(0, self._tables[0].num_rows, count))
        for table in self._tables:
            table.forget(rows)
        begin = time.perf_counter()
        try:
            for table in self._tables:
                table.read(rows)
        except CheckpointError as error:  # the request that needs such a row will fail, not the loading
            logger.warning("a row of the n-gram table cannot be read: %s", error)
        return time.perf_counter() - begin
