"""What tells a checkpoint file from another one of the same name, without reading all of it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_NUM_WINDOWS = 64
_WINDOW_BYTES = 4096


@dataclass(frozen=True)
class FileIdentity:
    """Size in bytes, and a hash of the safetensors header and of samples of the data."""

    size: int
    sample_sha256: str

    @classmethod
    def of(cls, path: Path) -> FileIdentity:
        """Identify the safetensors file ``path``, reading at most 256 KiB of its data.

        Windows spread evenly over the data, its first and last bytes included, differ between a model and a
        fine-tune of it, whose shapes and therefore sizes and headers are the same. Data no larger than the windows
        is hashed whole.
        """
        size = path.stat().st_size
        with path.open("rb", buffering=0) as file:
            header_size = 8 + int.from_bytes(file.read(8), "little")
            digest = hashlib.sha256(_read(file, 0, header_size))
            for start, end in _windows(header_size, size):
                digest.update(_read(file, start, end))
        return cls(size, digest.hexdigest())


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


def _windows(start: int, end: int) -> list[tuple[int, int]]:
    """The byte ranges of the data ``start`` to ``end`` that are hashed."""
    if end - start <= _NUM_WINDOWS * _WINDOW_BYTES:
        return [(start, end)]
    last = end - _WINDOW_BYTES
    starts = [start + (last - start) * i // (_NUM_WINDOWS - 1) for i in range(_NUM_WINDOWS)]
    return [(begin, begin + _WINDOW_BYTES) for begin in starts]


def _read(file: BinaryIO, start: int, end: int) -> bytes:
    file.seek(start)
    return file.read(end - start)
