"""What is measured of the disk of a table, and which figures are warned of."""

from __future__ import annotations

import logging
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundles
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from qwen4exp_trt.runtime import LLM, row_files
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.disk_speed import MOST_TOKEN_MS, DiskSpeed, file_system_of, measure, warn
from qwen4exp_trt.runtime.row_table import RowTable
from qwen4exp_trt.runtime.specs import PleResidency, Source
from qwen4exp_trt.runtime.tensor_reader import TensorReader
from qwen4exp_trt.runtime.tensor_source import FunctionSource

FAST = DiskSpeed("/models", "ext4", False, row_us=90.0, token_ms=0.4, prompt_token_ms=0.15, uses_threads=False)


@pytest.fixture
def table(tmp_path: Path) -> RowTable:
    save_file({"table": torch.arange(40_000).reshape(5_000, 8)}, tmp_path / "model.safetensors")
    return RowTable(Source("table"), TensorReader(Checkpoint.open(tmp_path)))


def test_a_table_in_a_file(table: RowTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some hundred rows, none of them from the page cache as far as the kernel does what it is told."""
    dropped, read = list[int](), list[int]()
    forget, own = row_files.RowFiles.forget, row_files.RowFiles.read

    def count_forget(self: Any, files: np.ndarray, offsets: np.ndarray) -> None:
        dropped.append(len(offsets))
        forget(self, files, offsets)

    def count_read(self: Any, files: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        read.append(len(offsets))
        return own(self, files, offsets)

    monkeypatch.setattr(row_files.RowFiles, "forget", count_forget)
    monkeypatch.setattr(row_files.RowFiles, "read", count_read)
    speed = measure([table], rows_per_token=16)
    assert speed is not None and dropped == read and 100 < sum(read) < 1000
    assert (speed.path, speed.file_system) == (str(tmp_path), file_system_of(tmp_path))
    assert speed.row_us > 0 and speed.token_ms > 0 and speed.prompt_token_ms > 0


def slowed(monkeypatch: pytest.MonkeyPatch, seconds: float, reads_ahead: bool) -> None:
    """A disk that takes ``seconds`` for what it was not told of, or is told in vain."""
    own, announced = row_files._read, set[int]()

    def read(file: Any, offset: int, memory: memoryview) -> Any:
        if offset not in announced:
            time.sleep(seconds)
        return own(file, offset, memory)

    def announce(reads: Any) -> None:
        time.sleep(seconds)
        announced.update(offset for _, offset, _ in reads)

    monkeypatch.setattr(row_files, "_read", read)
    monkeypatch.setattr(row_files, "_announce", announce if reads_ahead else lambda reads: None)


@pytest.mark.parametrize("reads_ahead", [True, False])
def test_a_file_system_that_ignores_what_is_announced_is_read_by_threads(
    table: RowTable, monkeypatch: pytest.MonkeyPatch, reads_ahead: bool
) -> None:
    slowed(monkeypatch, 0.003, reads_ahead)
    speed = measure([table], rows_per_token=16)
    assert speed is not None
    assert speed.row_us > 2900 and speed.uses_threads == (not reads_ahead)
    assert speed.token_ms < 16 * 3 or not reads_ahead
    rows = np.array([4999, 3, 3, 0])
    assert table.read(rows)[:, 0].tolist() == [4999 * 8, 24, 24, 0]


def test_a_disk_that_takes_long_is_asked_less(table: RowTable, monkeypatch: pytest.MonkeyPatch) -> None:
    slowed(monkeypatch, 0.05, reads_ahead=True)
    begin = time.perf_counter()
    speed = measure([table], rows_per_token=16)
    assert speed is not None and speed.is_slow and time.perf_counter() - begin < 2


def test_a_table_that_is_in_no_file() -> None:
    table = RowTable(Source("table"), FunctionSource(lambda name: torch.ones(4, 4)))
    assert measure([table], 16) is None


@pytest.mark.parametrize(
    "change,level,text",
    [
        ({}, logging.INFO, r"/models \(ext4\): 90 us for a row, 0.40 ms for the rows of a token, 0.15 ms"),
        ({"token_ms": MOST_TOKEN_MS + 1}, logging.WARNING, r"slow: 90 us for a row, 5.00 ms .* 4 ms a token would not"),
        (
            {"file_system": "nfs4", "is_remote": True},
            logging.WARNING,
            r"\(nfs4\), which may be remote: 90 us for a row",
        ),
    ],
)
def test_figures_are_logged(change: dict[str, Any], level: int, text: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        warn(replace(FAST, **change))
    (record,) = caplog.records
    assert record.levelno == level
    assert re.search(text, record.getMessage())


def test_the_file_system_of_a_path(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    lines = ["/dev/a / ext4 rw 0 0", f"host:/x {tmp_path}/with\\040blank nfs4 rw 0 0", "me /home/me fuse.sshfs rw 0 0"]
    mounts.write_text("\n".join([*lines, f"/dev/b {tmp_path} xfs rw 0 0"]))
    (tmp_path / "with blank").mkdir()
    assert file_system_of(tmp_path / "with blank" / "file", mounts) == "nfs4"
    assert file_system_of(tmp_path / "file", mounts) == "xfs"
    assert file_system_of(Path("/home/me/models"), mounts) == "fuse.sshfs"
    assert file_system_of(Path("/other"), mounts) == "ext4"
    assert file_system_of(tmp_path, tmp_path / "none") == "unknown"


def test_a_model_says_what_it_found(tmp_path_factory: pytest.TempPathFactory) -> None:
    base = tmp_path_factory.getbasetemp()
    bundle = bundles.disk_bundle(base)
    info = LLM(bundle, row_cache_bytes=2**12).info
    assert info["ngram_table"]["residency"] == PleResidency.DISK
    (disk,) = info["ngram_table"]["disks"].values()
    assert disk["file_system"] == file_system_of(base) and disk["token_ms"] > 0
    assert info["memory"]["uses"]["n-gram rows that are kept"] == 2**12
