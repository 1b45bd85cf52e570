from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from qwen4exp_trt.errors import CheckpointError
from qwen4exp_trt.runtime import tensor_reader as reader_module
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.tensor_reader import TensorReader
from qwen4exp_trt.runtime.tensor_source import Read


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


TENSORS = {
    "fp4": random_bytes(3, 8).view(torch.float4_e2m1fn_x2),
    "fp8": random_bytes(5, 7).view(torch.float8_e4m3fn),
    "bytes": random_bytes(3, 5, 2),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.tensor([2**62 + 1, -5, -(2**63)]),
    "int32": torch.arange(5, dtype=torch.int32),
    "half": torch.randn(3, 4).half(),
    "bf16": torch.randn(7, 3).bfloat16(),
    "float": torch.randn(4, 3),
    "scalar": torch.tensor(3.25),
    "empty": torch.empty(0, 3),
    "odd": random_bytes(1),
}


def as_bytes(tensor: Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    """A safetensors file with the tensors one behind another, in this order: offsets that no element is aligned to."""
    names = {torch.float4_e2m1fn_x2: "F4", torch.float8_e4m3fn: "F8_E4M3", torch.uint8: "U8", torch.bool: "BOOL"}
    names |= {torch.int64: "I64", torch.int32: "I32", torch.float16: "F16", torch.bfloat16: "BF16"}
    header, data = {}, b""
    for name, tensor in tensors.items():
        shape = list(tensor.shape)
        if tensor.dtype == torch.float4_e2m1fn_x2:
            shape[-1] *= 2
        content = bytes(as_bytes(tensor))
        offsets = [len(data), len(data) + len(content)]
        header[name] = {"dtype": names.get(tensor.dtype, "F32"), "shape": shape, "data_offsets": offsets}
        data += content
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.fixture(params=["as saved", "unaligned"])
def checkpoint(tmp_path: Path, request: pytest.FixtureRequest) -> Checkpoint:
    if request.param == "as saved":
        save_file(TENSORS, tmp_path / "model.safetensors")
    else:
        write_file(tmp_path / "model.safetensors", {"first": random_bytes(1), **TENSORS})
    return Checkpoint.open(tmp_path)


@pytest.fixture
def reader(checkpoint: Checkpoint) -> Iterator[TensorReader]:
    with TensorReader(checkpoint) as opened:
        yield opened


@pytest.fixture
def small_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every path of large tensors, with small ones: threads, and tensors cut into requests that end inside elements."""
    monkeypatch.setattr(reader_module, "_REQUEST_BYTES", 7)
    monkeypatch.setattr(reader_module, "_INLINE_BYTES", 0)
    monkeypatch.setattr(reader_module, "_CACHED_BYTES", 1)
    monkeypatch.setattr(reader_module, "_CACHED_FILE_BYTES", 1)


def assert_reads_everything(reader: TensorReader) -> None:
    for tensor, expected in zip(reader.tensors(list(TENSORS)), TENSORS.values(), strict=True):
        assert (tensor.dtype, tensor.shape) == (expected.dtype, expected.shape)
        assert as_bytes(tensor) == as_bytes(expected)
    for name, expected in TENSORS.items():
        if expected.ndim and len(expected) > 1:
            out = torch.empty_like(expected[1:3])
            reader.start([Read(name, out, (1, 3))])()
            assert as_bytes(out) == as_bytes(expected[1:3]), name


def test_every_dtype_and_shape(reader: TensorReader) -> None:
    assert_reads_everything(reader)


def test_every_dtype_in_small_requests_on_threads(small_requests: None, reader: TensorReader) -> None:
    assert_reads_everything(reader)


def test_a_tiny_model_starts_no_thread(reader: TensorReader) -> None:
    before = threading.active_count()
    reader.tensors(list(TENSORS))
    assert threading.active_count() == before


def test_neighbors_are_read_by_one_call(reader: TensorReader, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = record(monkeypatch, "preadv")
    reader.tensors(list(TENSORS))
    assert len(calls) == 1


def test_thousands_of_scattered_small_tensors_are_read_in_parallel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that takes 2 ms for each read: threads wait for it side by side."""
    tensors = {f"{index:04}": random_bytes(3) for index in range(2000)}
    write_file(tmp_path / "model.safetensors", tensors)
    original, waiting, at_once = os.preadv, [], []

    def slow(*args: Any) -> int:
        waiting.append(args)
        at_once.append(len(waiting))
        time.sleep(0.002)
        waiting.pop()
        return original(*args)

    monkeypatch.setattr(os, "preadv", slow)
    with TensorReader(Checkpoint.open(tmp_path)) as reader:
        got = reader.tensors(list(tensors)[::2])
    assert len(at_once) == 1000 and max(at_once) >= 8
    assert [tensor.tolist() for tensor in got] == [tensor.tolist() for tensor in list(tensors.values())[::2]]


def record(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[Any, ...]]:
    """The arguments of calls of a function of ``os``."""
    calls: list[tuple[Any, ...]] = []
    original: Callable[..., Any] = getattr(os, name)

    def call(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    monkeypatch.setattr(os, name, call)
    return calls


def test_only_the_asked_rows_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"w": torch.arange(4000).reshape(1000, 4)}, tmp_path / "model.safetensors")
    calls = record(monkeypatch, "preadv")
    with TensorReader(Checkpoint.open(tmp_path)) as reader:
        out = torch.empty(3, 4, dtype=torch.int64)
        reader.start([Read("w", out, (500, 503))])()
    assert out.flatten().tolist() == list(range(2000, 2012))
    assert sum(len(buffer) for _, buffers, _ in calls for buffer in buffers) == 3 * 4 * 8


def test_what_was_read_is_dropped_from_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each large request drops whole pages; closing drops the rest of a file from which much was read."""
    large = 20 << 20
    save_file({"large": torch.zeros(large, dtype=torch.uint8), "small": torch.ones(4)}, tmp_path / "large.safetensors")
    save_file({"other": torch.ones(1 << 10)}, tmp_path / "small.safetensors")
    calls = record(monkeypatch, "posix_fadvise")
    with TensorReader(Checkpoint.open(tmp_path)) as reader:
        reader.tensors(["large", "small", "other"])
        dropped = sorted(call[1:3] for call in calls)
    assert [call[1:] for call in calls[len(dropped) :]] == [(0, 0, os.POSIX_FADV_DONTNEED)]
    page = os.sysconf("SC_PAGE_SIZE")
    assert all(start % page == 0 and length % page == 0 for start, length in dropped)
    end = 0
    for start, length in dropped:
        assert start <= end, "a gap stays cached"
        end = start + length
    assert end >= large


def failing(*results: int | OSError) -> Callable[..., int]:
    """A `os.preadv` that gives these results, then whatever is asked."""
    left = list(results)
    original = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if not left:
            return original(descriptor, buffers, offset)
        result = left.pop(0)
        if isinstance(result, OSError):
            raise result
        if result == 0:
            return 0
        return original(descriptor, [buffers[0][:result]], offset)

    return preadv


def test_short_reads_are_continued(checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "preadv", failing(1, 2, 3, 1))
    with TensorReader(checkpoint) as reader:
        assert_reads_everything(reader)


@pytest.mark.parametrize("num_threads", [0, 1])
def test_a_read_error_names_file_and_tensor(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    if num_threads:
        monkeypatch.setattr(reader_module, "_INLINE_BYTES", 0)
    monkeypatch.setattr(os, "preadv", failing(OSError(errno.EIO, "Input/output error")))
    with (
        TensorReader(checkpoint) as reader,
        pytest.raises(CheckpointError, match=r"model\.safetensors: cannot read tensor bf16: Input/output error"),
    ):
        reader.tensors(["bf16"])


def test_a_file_that_was_truncated_after_it_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, {"a": random_bytes(10), "b": random_bytes(10), "c": random_bytes(10)})
    checkpoint, size = Checkpoint.open(tmp_path), path.stat().st_size
    os.truncate(path, size - 14)
    message = rf"model\.safetensors: ends at byte {size - 14:,}, inside tensor b: it was truncated after it was opened"
    with TensorReader(checkpoint) as reader:
        assert reader.tensors(["a"])[0].numel() == 10
        with pytest.raises(CheckpointError, match=message):
            reader.tensors(["a", "b", "c"])


def test_a_file_that_was_exchanged_or_removed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    write_file(path, {"a": random_bytes(10)})
    checkpoint, other = Checkpoint.open(tmp_path), Checkpoint.open(tmp_path)
    third = Checkpoint.open(tmp_path)
    write_file(path, {"b": random_bytes(10)})
    with (
        TensorReader(checkpoint) as reader,
        pytest.raises(CheckpointError, match="changed while it was open: tensor a"),
    ):
        reader.tensors(["a"])
    path.write_bytes(b"12345678{")
    with TensorReader(third) as reader, pytest.raises(CheckpointError, match="changed while it was open"):
        reader.tensors(["a"])
    path.unlink()
    with TensorReader(other) as reader, pytest.raises(CheckpointError, match="cannot be read: No such file"):
        reader.tensors(["a"])


def test_unknown_names_and_dtypes(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2, dtype=torch.complex64)}, tmp_path / "model.safetensors")
    with TensorReader(Checkpoint.open(tmp_path)) as reader:
        with pytest.raises(CheckpointError, match="tensor a is C64; known are BOOL, U8"):
            reader.describe("a")
        with pytest.raises(CheckpointError, match=f"no tensor b in the safetensors files of {tmp_path}"):
            reader.describe("b")


def test_two_checkpoints_are_one_source(tmp_path: Path) -> None:
    for folder, name, value in (("one", "a", 1.0), ("two", "a#codes", 2.0), ("third", "a", 3.0)):
        (tmp_path / folder).mkdir()
        save_file({name: torch.full((3,), value)}, tmp_path / folder / "model.safetensors")
    one, two, third = (Checkpoint.open(tmp_path / folder) for folder in ("one", "two", "third"))
    with TensorReader(one, two) as reader:
        assert [tensor.tolist() for tensor in reader.tensors(["a#codes", "a"])] == [[2.0] * 3, [1.0] * 3]
        with pytest.raises(CheckpointError, match=r"no tensor b in the safetensors files of .*one or .*two"):
            reader.describe("b")
    with pytest.raises(CheckpointError, match=r"a: in both .*one and .*third"):
        TensorReader(one, two, third)


def test_closing_lets_go_of_files(checkpoint: Checkpoint, small_requests: None) -> None:
    def num_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_open()
    reader = TensorReader(checkpoint)
    reader.tensors(["bf16", "float"])
    assert num_open() == before + 1
    reader.close()
    assert num_open() == before


@pytest.mark.slow  # it takes time, which a busy machine stretches
def test_opening_a_checkpoint_of_many_tensors_is_quick(tmp_path: Path) -> None:
    """One release has 300,000: one for each projection of each expert, and scalars beside them."""
    per_file, files = 10_000, 6
    for file in range(files):
        header = {
            f"model.language_model.layers.{file}.mlp.experts.{index}.down_proj.weight_scale_2": {
                "dtype": "F32",
                "shape": [],
                "data_offsets": [4 * index, 4 * index + 4],
            }
            for index in range(per_file)
        }
        text = json.dumps(header).encode()
        data = torch.arange(per_file, dtype=torch.float32).numpy().tobytes()
        (tmp_path / f"{file}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    begin = time.process_time()
    checkpoint = Checkpoint.open(tmp_path)
    names = checkpoint.names
    assert (len(names), time.process_time() - begin < 3) == (per_file * files, True)
    with TensorReader(checkpoint) as reader:
        begin = time.process_time()
        some = [name for name in names if ".layers.3." in name][:2000]
        values = [int(tensor) for tensor in reader.tensors(some)]
        assert values == [int(name.split(".")[6]) for name in some]
        assert time.process_time() - begin < 1.5
