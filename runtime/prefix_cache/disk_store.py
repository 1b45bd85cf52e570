"""The disk tier: a folder of blobs within a budget, written by a thread of its own.

Processes may share the folder: a file appears under its name whole (temporary name, then renamed), whoever finds one
gone or damaged has a miss, and who writes looks from time to time at what the others wrote.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from qwen4exp_trt.errors import CacheError
from qwen4exp_trt.runtime.prefix_cache.blob import BadBlobError, blob_size, read_blob, write_blob
from qwen4exp_trt.runtime.prefix_cache.packed_rows import PackedRow
from qwen4exp_trt.runtime.prefix_cache.sized_lru import SizedLRU

logger = logging.getLogger(__name__)

_PARTIAL = ".partial"
_BLOB_PATH = re.compile(r"[0-9a-f]{32}/[0-9a-f]{32}\.(page|slot)\.blob")
_PARTIAL_PATH = re.compile(r"[0-9a-f]{32}/\.[0-9a-f]{16}\.partial")
"""What is ours in the folder. Whatever else is there is never removed, and no blob."""
_STALE_SECONDS = 3600
"""A partial file older than that was left by a process that was killed."""
_SECONDS_BETWEEN_SCANS = 60
_READERS = 4


@dataclass
class DiskCounters:
    """What became of blobs since the start."""

    written: int = 0
    dropped: int = 0
    """Not written because the queue had no room."""
    write_errors: int = 0
    damaged: int = 0
    """Found, but not what was looked for or not readable."""
    evicted: int = 0


@dataclass(frozen=True)
class BlobRequest:
    """A blob by name and header, and the memory of its payload."""

    name: str
    header: bytes
    row: PackedRow


@dataclass
class _Job:
    blob: BlobRequest | None
    used: Sequence[str] = field(default=())


class DiskStore:
    """Blobs of ``model`` (a name for a folder) below ``folder``, whose blobs of all models take ``budget`` bytes.

    Up to ``queue_bytes`` wait to be written; what comes beyond is dropped and counted. `CacheError` if ``folder``
    cannot be used at the start. Later failures of the disk are log lines and counters.
    """

    def __init__(self, folder: Path, model: str, budget: int, queue_bytes: int) -> None:
        self.folder, self._own, self._queue_bytes = folder, folder / model, queue_bytes
        self.counters = DiskCounters()
        self._files: SizedLRU[str] = SizedLRU(budget)
        """Sizes by path below ``folder``."""
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._queued: dict[str, int] = {}
        """Sizes of the blobs in the queue, by name."""
        self._cancelled: set[str] = set()
        """Of those in the queue, the ones that were removed."""
        self._is_busy = self._is_closed = self._has_failed = False
        self._make_folder()
        self._scan()
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="prefix-cache-reader")
        self._writer = threading.Thread(target=self._work, name="prefix-cache-writer", daemon=True)
        self._writer.start()

    @property
    def budget(self) -> int:
        return self._files.budget

    @property
    def num_bytes(self) -> int:
        """Of all models' blobs, as far as known."""
        return self._files.num_bytes

    def __contains__(self, name: str) -> bool:
        """True if a blob is there, or on its way."""
        return name in self._queued or self._path(name) in self._files

    def is_written(self, name: str) -> bool:
        return self._path(name) in self._files

    def has_room(self, num_bytes: int) -> bool:
        """True if the queue takes a payload of ``num_bytes`` now."""
        with self._changed:
            queued = sum(self._queued.values())
            return not self._is_closed and queued + num_bytes <= self._queue_bytes and num_bytes <= self.budget

    def put(self, blob: BlobRequest) -> None:
        """Have a blob written, for which `has_room`, unless it is there already."""
        with self._changed:
            if blob.name not in self and not self._is_closed:
                self._queued[blob.name] = blob.row.memory_bytes
                self._jobs.append(_Job(blob))
                self._changed.notify_all()

    def use(self, names: Sequence[str]) -> None:
        """Note that blobs are used, though not read: they should outlive others."""
        with self._changed:
            here = [name for name in names if self._path(name) in self._files]
            for name in here:
                self._files.touch(self._path(name))
            self._jobs.append(_Job(None, here))
            self._changed.notify_all()

    def read(self, blobs: Sequence[BlobRequest]) -> list[bool]:
        """Fill the rows of blobs, several at once; False for each that is not there or not good, which is gone then."""
        return list(self._readers.map(self._read_one, blobs))

    def remove(self, name: str) -> None:
        """Forget a blob and delete its file."""
        with self._changed:
            self._files.remove(self._path(name))
            if name in self._queued:
                self._cancelled.add(name)
        with suppress(OSError):
            (self._own / name).unlink()

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that is queued is on disk; False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._jobs and not self._is_busy, timeout)

    def close(self, timeout: float | None = None) -> None:
        """`flush`, and end the threads. The store takes nothing any more, and has nothing."""
        is_outside = threading.current_thread() is not self._writer  # where the garbage collector may call it
        if is_outside:
            self.flush(timeout)
        with self._changed:
            self._is_closed, self._files = True, SizedLRU(self.budget)
            self._changed.notify_all()
        if is_outside:
            self._writer.join(timeout)
        self._readers.shutdown(wait=False)

    def _path(self, name: str) -> str:
        return f"{self._own.name}/{name}"

    def _make_folder(self) -> None:
        try:
            # What is in it tells what users have asked.
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._own.mkdir(exist_ok=True, mode=0o700)
            probe = self._own / f".{secrets.token_hex(8)}{_PARTIAL}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise CacheError(
                f"the prefix cache cannot be kept in {self.folder}: {error.strerror}; give a folder that can be written"
            ) from error

    # --- the thread that writes ---------------------------------------------------------------------------------------

    def _work(self) -> None:
        while True:
            with self._changed:
                self._is_busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
                job, self._is_busy = self._jobs.popleft(), True
            for name in job.used:
                with suppress(OSError):
                    os.utime(self._own / name)
            if job.blob is not None:
                self._write(job.blob)

    def _write(self, blob: BlobRequest) -> None:
        partial = self._own / f".{secrets.token_hex(8)}{_PARTIAL}"
        size = blob_size(blob.header, blob.row.num_bytes)
        is_written = False
        try:
            self._make_room(size)
            self._own.mkdir(parents=True, exist_ok=True, mode=0o700)  # somebody may have removed it
            write_blob(partial, blob.header, blob.row.payload())
            with self._changed:
                if blob.name not in self._cancelled:
                    os.replace(partial, self._own / blob.name)
                    is_written = True
            self._has_failed = False
        except (OSError, RuntimeError) as error:  # the latter from a GPU that was lost with what it was to copy
            if not self._has_failed:  # one line for a disk that stays full
                logger.warning("prefix cache: cannot write to %s: %s", self._own, error)
            self._has_failed = True
        finally:
            with suppress(OSError):
                partial.unlink()
            with self._changed:
                del self._queued[blob.name]
                if is_written:
                    self._files.add(self._path(blob.name), size)
                self._cancelled.discard(blob.name)
                self.counters.written += is_written
                self.counters.write_errors += self._has_failed

    def _make_room(self, size: int) -> None:
        if time.monotonic() - self._scanned > _SECONDS_BETWEEN_SCANS:
            self._scan()
        while True:
            with self._changed:
                if not self._files.excess(size):
                    return
                oldest = self._files.oldest
                self._files.remove(oldest)
                self.counters.evicted += 1
            with suppress(OSError):
                (self.folder / oldest).unlink()

    def _scan(self) -> None:
        """Take stock of all blobs, the longest unused first, and remove partial files that nobody writes any more."""
        self._scanned, found, now = time.monotonic(), [], time.time()
        for path in self.folder.glob("*/*"):
            name = path.relative_to(self.folder).as_posix()
            with suppress(OSError):  # removed meanwhile
                if _BLOB_PATH.fullmatch(name):
                    stat = path.stat()
                    found.append((stat.st_mtime, name, stat.st_size))
                elif _PARTIAL_PATH.fullmatch(name) and now - path.stat().st_mtime > _STALE_SECONDS:
                    path.unlink()
        with self._changed:
            files: SizedLRU[str] = SizedLRU(self._files.budget)
            for _, path, size in sorted(found):
                files.add(path, size)
            self._files = SizedLRU(self.budget) if self._is_closed else files

    # --- reading ------------------------------------------------------------------------------------------------------

    def _read_one(self, blob: BlobRequest) -> bool:
        if not self.is_written(blob.name):
            return False
        path = self._own / blob.name
        try:
            read_blob(path, blob.header, blob.row.payload())
        except (BadBlobError, OSError) as error:
            logger.warning("prefix cache: %s is not used: %s", path, error)
            with self._changed:
                self.counters.damaged += 1
            self.remove(blob.name)
            return False
        return True
