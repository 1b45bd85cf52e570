"""What tells a checkpoint file from another one of the same name, without reading all of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_MIN_WINDOWS = 64
_WINDOW_BYTES = 4096
_BYTES_A_WINDOW = 16 << 20


@dataclass(frozen=True)
class FileIdentity:
    """Size in bytes, and a hash of the safetensors header and of samples of the data."""

    size: int
    sample_sha256: str

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Identify the safetensors file ``path`` by samples, a window of 4 KiB for each 16 MiB and at least 64.

        They are spread evenly over the data, its first and last bytes included, and so differ between a model and a
        fine-tune of it, whose shapes and therefore sizes and headers are the same. A change of a few tensors between
        two windows is not noticed. Data no larger than the windows is hashed whole.
        """
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            # Of a damaged file the first bytes may say anything.
            header_size = min(8 + int.from_bytes(file.read(8), "little"), size)
            digest = hashlib.sha256(_read(file, 0, header_size))
            for start, end in _windows(header_size, size, _MIN_WINDOWS):
                digest.update(_read(file, start, end))
        return cls(size, digest.hexdigest())


def sample_of_memory(memory: memoryview) -> bytes:
    """A hash of samples of some bytes: all if they are few, else 4 KiB of each 16 MiB and at least 64 times that."""
    digest = hashlib.sha256()
    for start, end in _windows(0, len(memory), _MIN_WINDOWS):
        digest.update(memory[start:end])
    return digest.digest()


def sample_of(path: Path, start: int, end: int) -> bytes:
    """A hash of samples of the bytes ``start`` to ``end`` of a file: the outer 4 KiB, and 4 KiB of each 16 MiB."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        for window in _windows(start, end, min_windows=2):
            digest.update(_read(file, *window))
    return digest.digest()


def identity_differences(folder: Path, expected: Mapping[str, FileIdentity]) -> list[str]:
    """What of the files ``expected`` (by name) of ``folder`` is missing or another one."""
    return [problem for name, identity in expected.items() if (problem := _difference(folder / name, name, identity))]


def _difference(path: Path, name: str, expected: FileIdentity) -> str | None:
    if not os.path.isfile(path):  # unlike that of Path, it takes any name
        return f"{name} is missing"
    found = FileIdentity.of(path)
    if found.size != expected.size:
        return f"{name} has {found.size:,} bytes instead of {expected.size:,}"
    return None if found == expected else f"{name} has the same size but other content"


def _windows(start: int, end: int, min_windows: int) -> list[tuple[int, int]]:
    """The byte ranges of the data ``start`` to ``end`` that are hashed."""
    count = max(min_windows, (end - start) // _BYTES_A_WINDOW)
    if end - start <= count * _WINDOW_BYTES:
        return [(start, end)]
    last = end - _WINDOW_BYTES
    starts = [start + (last - start) * i // (count - 1) for i in range(count)]
    return [(begin, begin + _WINDOW_BYTES) for begin in starts]


def _read(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)
