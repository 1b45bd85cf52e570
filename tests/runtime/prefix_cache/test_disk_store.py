from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen4exp_trt.errors import CacheError
from qwen4exp_trt.runtime.prefix_cache import disk_store
from qwen4exp_trt.runtime.prefix_cache.blob import blob_size, header_bytes
from qwen4exp_trt.runtime.prefix_cache.disk_store import BlobRequest, DiskStore
from qwen4exp_trt.runtime.prefix_cache.packed_rows import PackedRow

SIZE = 1000
MODEL, OTHER = "0" * 32, "1" * 32


def name_of(number: int) -> str:
    return f"{number:032x}.page.blob"


FILE_SIZE = blob_size(header_bytes(name=name_of(0)), SIZE)

Open = Callable[..., DiskStore]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    stores = []

    def open_one(model: str = MODEL, budget: int = 10**6, queue_bytes: int = 10**6) -> DiskStore:
        stores.append(DiskStore(tmp_path / "cache", model, budget, queue_bytes))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


def blob(number: int, value: int = -1) -> BlobRequest:
    """Blob ``number``, with that number in all its bytes, or with ``value``."""
    name = name_of(number)
    fill = number if value < 0 else value
    return BlobRequest(name, header_bytes(name=name), PackedRow((torch.full((SIZE,), fill, dtype=torch.uint8),)))


def write(store: DiskStore, *numbers: int) -> None:
    for number in numbers:
        store.put(blob(number))
        assert store.flush(10)


def read(store: DiskStore, number: int) -> bool:
    request = blob(number, value=255)
    (is_good,) = store.read([request])
    if is_good:
        assert (request.row.parts[0] == number).all()
    return is_good


def test_a_blob_outlives_the_store(open_store: Open) -> None:
    first = open_store()
    write(first, 1, 2)
    assert name_of(1) in first and first.is_written(name_of(1)) and first.num_bytes == 2 * FILE_SIZE
    first.close()
    again = open_store()
    assert read(again, 1) and read(again, 2) and not read(again, 3)
    assert again.num_bytes == 2 * FILE_SIZE
    assert again.counters.damaged == 0


def test_the_least_recently_used_go_first(open_store: Open) -> None:
    store = open_store(budget=3 * FILE_SIZE)
    write(store, 1, 2, 3)
    store.use([name_of(1)])
    write(store, 4)
    assert [read(store, number) for number in (1, 2, 3, 4)] == [True, False, True, True]
    assert (store.counters.evicted, store.num_bytes) == (1, 3 * FILE_SIZE)
    assert sorted(os.listdir(store.folder / MODEL)) == [name_of(1), name_of(3), name_of(4)]


def test_use_is_remembered_over_a_restart(open_store: Open) -> None:
    store = open_store()
    write(store, 1, 2, 3)
    for number in (1, 2, 3):
        os.utime(store.folder / MODEL / name_of(number), (number, number))
    store.use([name_of(1)])
    store.close()
    again = open_store(budget=3 * FILE_SIZE)
    write(again, 4)
    assert [again.is_written(name_of(number)) for number in (1, 2, 3, 4)] == [True, False, True, True]


def test_the_budget_is_that_of_all_models(open_store: Open) -> None:
    other = open_store(OTHER)
    write(other, 1)
    other.close()
    store = open_store(budget=2 * FILE_SIZE)
    assert store.num_bytes == FILE_SIZE
    assert name_of(1) not in store, "it is another model's"
    write(store, 2, 3)
    assert os.listdir(store.folder / OTHER) == []


def test_a_blob_beyond_the_budget_is_not_taken(open_store: Open) -> None:
    store = open_store(budget=SIZE - 1)
    assert not store.has_room(SIZE)


def test_a_full_queue_takes_nothing(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, write_blob = threading.Event(), disk_store.write_blob

    def slow_disk(*args: Any) -> None:
        go_on.wait(10)
        write_blob(*args)

    monkeypatch.setattr(disk_store, "write_blob", slow_disk)
    store = open_store(queue_bytes=2 * SIZE)
    for number in (1, 2):
        assert store.has_room(SIZE)
        store.put(blob(number))
    assert not store.has_room(SIZE), "what is being written counts as well"
    assert name_of(1) in store and not store.is_written(name_of(1))
    go_on.set()
    assert store.flush(10) and store.has_room(SIZE)
    assert store.counters.written == 2


def test_one_removed_while_it_waits_is_not_written(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, write_blob = threading.Event(), disk_store.write_blob
    monkeypatch.setattr(disk_store, "write_blob", lambda *args: (go_on.wait(10), write_blob(*args)))
    store = open_store()
    for number in (1, 2):
        store.put(blob(number))
    store.remove(name_of(1))
    store.remove(name_of(2))
    go_on.set()
    assert store.flush(10)
    assert os.listdir(store.folder / MODEL) == []
    write(store, 1)
    assert read(store, 1)


def damage_nothing_left(path: Path) -> None:
    path.write_bytes(b"")


def damage_torn(path: Path) -> None:
    os.truncate(path, FILE_SIZE // 2)


def damage_flipped(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def damage_swapped(path: Path) -> None:
    shutil.copyfile(path.with_name(name_of(2)), path)


def damage_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def damage_removed(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    "damage", [damage_nothing_left, damage_torn, damage_flipped, damage_swapped, damage_folder, damage_removed]
)
def test_a_damaged_blob_is_a_miss_and_one_log_line(
    open_store: Open, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None]
) -> None:
    store = open_store()
    write(store, 1, 2)
    damage(store.folder / MODEL / name_of(1))
    with caplog.at_level(logging.WARNING):
        assert [read(store, 1), read(store, 2)] == [False, True]
        assert not read(store, 1), "it is forgotten"
    (record,) = caplog.records
    assert f"{name_of(1)} is not used" in record.getMessage()
    assert store.counters.damaged == 1
    if damage is not damage_folder:
        write(store, 1)
        assert read(store, 1), "it can be written again"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_blob_is_a_miss(open_store: Open) -> None:
    store = open_store()
    write(store, 1)
    (store.folder / MODEL / name_of(1)).chmod(0)
    assert not read(store, 1)


def test_a_folder_removed_while_running(open_store: Open) -> None:
    store = open_store()
    write(store, 1)
    shutil.rmtree(store.folder)
    assert not read(store, 1)
    write(store, 2)
    assert read(store, 2), "it is made again"


def test_a_full_disk_is_one_log_line(
    open_store: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_blob = disk_store.write_blob

    def full(path: Path, *args: Any) -> None:
        path.write_bytes(b"the beginning")
        raise OSError(errno.ENOSPC, "No space left on device")

    store = open_store()
    monkeypatch.setattr(disk_store, "write_blob", full)
    with caplog.at_level(logging.WARNING):
        write(store, 1, 2, 3)
    assert [record.getMessage() for record in caplog.records if "No space left" in record.getMessage()] != []
    assert len(caplog.records) == 1
    assert (store.counters.written, store.counters.write_errors) == (0, 3)
    assert os.listdir(store.folder / MODEL) == [], "nothing half written is left"
    assert not read(store, 1)
    monkeypatch.setattr(disk_store, "write_blob", write_blob)
    write(store, 1)
    assert read(store, 1)


def test_a_copy_that_the_gpu_lost_is_not_written(open_store: Open) -> None:
    class Lost:
        def synchronize(self) -> None:
            raise RuntimeError("the GPU is lost")

    store, whole = open_store(), blob(1)
    store.put(replace(whole, row=replace(whole.row, ready=Lost())))
    assert store.flush(10), "the thread goes on"
    assert store.counters.write_errors == 1
    write(store, 1)
    assert read(store, 1)


def test_two_processes_share_a_folder(open_store: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_store, "_SECONDS_BETWEEN_SCANS", 0)
    one, two = open_store(budget=4 * FILE_SIZE), open_store(budget=4 * FILE_SIZE)
    for number in range(1, 10):
        one.put(blob(number))
        two.put(blob(number))
        two.put(blob(number + 100))
        assert one.flush(10) and two.flush(10)
    for store in (one, two):
        assert store.counters.write_errors == 0
        for number in (*range(1, 10), *range(101, 110)):
            read(store, number)  # right, or a miss
    assert len(os.listdir(one.folder / MODEL)) <= 5, "the budget holds within what both write at once"


def test_what_a_killed_process_left_is_removed(open_store: Open) -> None:
    store = open_store()
    write(store, 1)
    old, new = (store.folder / MODEL / f".{name * 16}.partial" for name in ("a", "b"))
    for path in (old, new):
        path.touch()
    os.utime(old, (0, 0))
    again = open_store()
    assert (old.exists(), new.exists()) == (False, True)
    assert again.num_bytes == FILE_SIZE


def test_what_others_keep_in_the_folder_is_left_alone(open_store: Open) -> None:
    store = open_store(budget=FILE_SIZE)
    others = [
        store.folder / "data" / "1.blob",
        store.folder / MODEL / "mine.page.blob",
        store.folder / MODEL / ".partial",
    ]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(SIZE))
        os.utime(path, (0, 0))
    store.close()
    again = open_store(budget=FILE_SIZE)
    assert again.num_bytes == 0
    write(again, 1, 2)
    assert again.counters.evicted == 1
    assert all(path.exists() for path in others)


def test_a_folder_that_cannot_be_used_is_refused_at_the_start(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(CacheError, match=r"prefix cache cannot be kept in .*file.*give a folder that can be written"):
        DiskStore(file, "model", 10, 10)


def test_a_closed_store_takes_nothing(open_store: Open) -> None:
    store = open_store()
    store.close()
    assert not store.has_room(1)
    store.put(blob(1))
    assert name_of(1) not in store
    store.close()
