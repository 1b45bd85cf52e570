"""The file of one page or slot: a header that says exactly what it belongs to, a checksum, and the packed bytes.

    magic (8 bytes) | format version, size of the header (uint32, little endian) | header (JSON) | checksum | payload

Whoever reads a blob knows what the header must be and compares its bytes, so nothing of a file is ever parsed. The
checksum is BLAKE2b with 128 bits: a CRC-32 is three times faster, but misses one in four billion damages, and a missed
one is wrong text without a sign. Reading a blob costs far less than computing what it holds in either case.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"Q4E-BLOB"
FORMAT_VERSION = 1
DIGEST_BYTES = 16

_PREFIX = struct.Struct("<8sII")


class BadBlobError(Exception):
    """Why a file is not the blob that was looked for."""


def header_bytes(**fields: Any) -> bytes:
    """The header of ``fields``, which are JSON values: always the same bytes for equal fields."""
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def blob_size(header: bytes, num_bytes: int) -> int:
    """Bytes of the file with a payload of ``num_bytes``."""
    return _PREFIX.size + len(header) + DIGEST_BYTES + num_bytes


def write_blob(path: Path, header: bytes, payload: Sequence[memoryview]) -> None:
    """Write a new file, readable by its owner alone: it tells what somebody has asked."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        for piece in (_PREFIX.pack(MAGIC, FORMAT_VERSION, len(header)), header, _digest(payload), *payload):
            _write_all(file, memoryview(piece))


def read_blob(path: Path, header: bytes, payload: Sequence[memoryview]) -> None:
    """Fill ``payload``. `BadBlobError` for a file of another version, model or prefix, or a damaged one: what
    ``payload`` holds then is worthless. OSError for one that cannot be read."""
    with path.open("rb", buffering=0) as file:
        prefix = file.read(_PREFIX.size)
        if len(prefix) < _PREFIX.size:
            raise BadBlobError(f"it ends after {len(prefix)} bytes")
        magic, version, header_size = _PREFIX.unpack(prefix)
        if magic != MAGIC:
            raise BadBlobError("it is no file of this cache, or damaged")
        if version != FORMAT_VERSION:
            raise BadBlobError(f"it has the format {version}, this is {FORMAT_VERSION}")
        if header_size != len(header) or file.read(header_size) != header:
            raise BadBlobError("it belongs to another model, version or prefix, or is damaged")
        found, expected = os.fstat(file.fileno()).st_size, blob_size(header, sum(map(len, payload)))
        if found != expected:
            raise BadBlobError(f"it has {found:,} bytes instead of {expected:,}")
        digest = file.read(DIGEST_BYTES)
        if not all(_read_all(file, piece) for piece in payload):
            raise BadBlobError("it became shorter while it was read")
    if digest != _digest(payload):
        raise BadBlobError("its checksum is wrong")


def _digest(payload: Iterable[memoryview]) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for piece in payload:
        digest.update(piece)
    return digest.digest()


def _write_all(file: BinaryIO, piece: memoryview) -> None:
    while len(piece):
        piece = piece[file.write(piece) :]


def _read_all(file: Any, piece: memoryview) -> bool:
    while len(piece):
        count = file.readinto(piece)
        if not count:
            return False
        piece = piece[count:]
    return True
