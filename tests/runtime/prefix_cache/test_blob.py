from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen4exp_trt.runtime.prefix_cache.blob import (
    FORMAT_VERSION,
    BadBlobError,
    blob_size,
    header_bytes,
    read_blob,
    write_blob,
)

HEADER = header_bytes(model="m", kind="page", token_ids=[1, 2, 3])
PAYLOAD = [bytes(range(200)), b"", b"the second part"]


def write(path: Path, header: bytes = HEADER) -> bytes:
    path.unlink(missing_ok=True)
    write_blob(path, header, [memoryview(part) for part in PAYLOAD])
    return path.read_bytes()


def read(path: Path, header: bytes = HEADER) -> list[bytes]:
    parts = [bytearray(len(part)) for part in PAYLOAD]
    read_blob(path, header, [memoryview(part) for part in parts])
    return [bytes(part) for part in parts]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blobs") / "a.blob"


def test_what_is_written_is_read(path: Path) -> None:
    data = write(path)
    assert read(path) == PAYLOAD
    assert len(data) == blob_size(HEADER, sum(map(len, PAYLOAD)))
    assert path.stat().st_mode & 0o777 == 0o600, "nobody else may read what a user has asked"


def test_equal_fields_are_equal_headers() -> None:
    assert header_bytes(a=1, b=[2]) == header_bytes(b=[2], a=1) != header_bytes(a=1, b=[3])


def test_a_file_is_never_overwritten(path: Path) -> None:
    write(path)
    with pytest.raises(FileExistsError):
        write_blob(path, HEADER, [])


@pytest.mark.parametrize("length", range(0, 300, 7))
def test_a_torn_file_is_refused(path: Path, length: int) -> None:
    data = write(path)
    path.write_bytes(data[: min(length, len(data) - 1)])
    with pytest.raises(BadBlobError):
        read(path)


@given(st.data())
def test_a_flipped_bit_is_refused(path: Path, data: st.DataObject) -> None:
    whole = bytearray(write(path))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    with pytest.raises(BadBlobError):
        read(path)


@given(noise=st.binary(max_size=400))
def test_any_other_file_is_refused(path: Path, noise: bytes) -> None:
    path.write_bytes(noise)
    with pytest.raises(BadBlobError):
        read(path)


def test_what_was_added_is_refused(path: Path) -> None:
    path.write_bytes(write(path) + b"x")
    with pytest.raises(BadBlobError, match="instead of"):
        read(path)


def test_why_a_blob_is_refused(path: Path) -> None:
    data = write(path)
    with pytest.raises(BadBlobError, match="belongs to another model, version or prefix"):
        read(path, header_bytes(model="n", kind="page", token_ids=[1, 2, 3]))
    path.write_bytes(data[:8] + (FORMAT_VERSION + 1).to_bytes(4, "little") + data[12:])
    with pytest.raises(BadBlobError, match=rf"has the format {FORMAT_VERSION + 1}, this is {FORMAT_VERSION}"):
        read(path)
    path.write_bytes(data[:-1] + b"!")
    with pytest.raises(BadBlobError, match="checksum"):
        read(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read(path)
