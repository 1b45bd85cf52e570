"""Rows from all over files: how many reads they take, and what becomes of reads that fail."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen4exp_trt.runtime.row_files import FailedRowsError, RowFile, RowFiles

ROW = 16
SIZES = (300_000, 5_000)
PREADV = os.preadv


@pytest.fixture
def files(tmp_path: Path) -> Iterator[RowFiles]:
    """Two files in which byte i is ``i % 251`` and ``i % 241``."""
    opened = []
    for number, (size, modulus) in enumerate(zip(SIZES, (251, 241), strict=True)):
        path = tmp_path / f"{number}.bin"
        path.write_bytes((np.arange(size) % modulus).astype(np.uint8).tobytes())
        opened.append(RowFile(path, os.open(path, os.O_RDONLY)))
    yield RowFiles(opened, ROW)
    for file in opened:
        os.close(file.descriptor)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Offset and size of every read."""
    found: list[tuple[int, int]] = []

    def preadv(descriptor: int, buffers: list[Any], offset: int) -> int:
        found.append((offset, sum(map(len, buffers))))
        return PREADV(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return found


def read(files: RowFiles, *places: tuple[int, int]) -> np.ndarray:
    """The rows at places, each a file and an offset."""
    return files.read(*np.array(places, dtype=np.int64).reshape(-1, 2).T)


def expected(*places: tuple[int, int]) -> np.ndarray:
    return np.array([(offset + np.arange(ROW)) % (251, 241)[file] for file, offset in places])


@pytest.mark.parametrize("threads", [False, True])
def test_rows_in_any_order_and_more_than_once(files: RowFiles, threads: bool) -> None:
    if threads:
        files.use_threads()
    generator = np.random.default_rng(0)
    for count in (0, 1, 2, 100, 3000):
        number = generator.integers(0, 2, count)
        offsets = (generator.random(count) * (np.array(SIZES)[number] - ROW)).astype(np.int64)
        places = list(zip(number.tolist(), offsets.tolist(), strict=True))
        assert np.array_equal(read(files, *places), expected(*places).reshape(count, ROW))


def test_near_rows_are_one_read(files: RowFiles, calls: list[tuple[int, int]]) -> None:
    """Also if they overlap; not across files, large gaps, and multiples of 128 KiB."""
    near = [(0, 100), (0, 116), (0, 120), (0, 116), (0, 2_000)]
    assert np.array_equal(read(files, *near), expected(*near))
    assert calls == [(100, 1_916)]
    calls.clear()
    far = [(1, 100), (0, 100), (0, 4_000), (0, 131_071 - ROW), (0, 131_080)]
    assert np.array_equal(read(files, *far), expected(*far))
    assert len(calls) == 5 and {size for _, size in calls} == {ROW}


def failing(bad: Callable[[int, int], bool], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Reads of ``bad(offset, size)`` fail; the offsets of all."""
    tried: list[int] = []

    def preadv(descriptor: int, buffers: list[Any], offset: int) -> int:
        tried.append(offset)
        if bad(offset, sum(map(len, buffers))):
            raise OSError(errno.EIO, "Input/output error")
        return PREADV(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    return tried


def test_a_bad_row_among_near_ones_fails_alone(files: RowFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(lambda offset, size: offset <= 1_005 < offset + size, monkeypatch)
    places = [(0, 500), (0, 1_000), (0, 1_100), (1, 3), (0, 1_000)]
    with pytest.raises(
        FailedRowsError, match=r"0\.bin: cannot read 16 bytes at 1,000: Input/output error \(EIO\)"
    ) as error:
        read(files, *places)
    assert sorted(error.value.failures) == [1, 4]


@pytest.mark.parametrize("spacing", [ROW, 3_000], ids=["in one read", "in many"])
def test_a_dead_disk_is_not_asked_for_ever(files: RowFiles, monkeypatch: pytest.MonkeyPatch, spacing: int) -> None:
    """Each failed read may take a minute. What was not tried has failed as well."""
    tried = failing(lambda offset, size: True, monkeypatch)
    places = [(0, spacing * row) for row in range(99)]
    with pytest.raises(FailedRowsError) as error:
        read(files, *places)
    assert sorted(error.value.failures) == list(range(99)) and len(tried) <= 66


def test_a_file_system_that_gives_less_than_asked_is_asked_again(
    files: RowFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: PREADV(fd, [buffers[0][:5]], offset))
    places = [(0, 7), (1, 4_900)]
    assert np.array_equal(read(files, *places), expected(*places))


def test_the_end_of_a_file(files: RowFiles) -> None:
    assert read(files, (1, 5_000 - ROW)).shape == (1, ROW)
    with pytest.raises(
        FailedRowsError, match=r"1\.bin: ends at byte 5,000, but 16 bytes at 4,990 are needed: it was trun"
    ):
        read(files, (1, 4_990))
