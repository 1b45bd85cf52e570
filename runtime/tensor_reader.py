"""Reads tensors of safetensors files by their offsets: in parallel, into given memory, and not through mapped pages.

What was read is dropped from the page cache (``POSIX_FADV_DONTNEED``): on a machine whose GPU shares the memory, a
cached checkpoint would take the room of the weights. ``O_DIRECT`` would bypass the cache, but it wants aligned
offsets, which tensors do not have, hence a second copy; and some file systems refuse it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from qwen4exp_trt.errors import CheckpointError
from qwen4exp_trt.runtime.checkpoint import Checkpoint, listing
from qwen4exp_trt.runtime.row_files import RowFile, RowFiles
from qwen4exp_trt.runtime.tensor_source import Described, Read, RowReader

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F4": torch.float4_e2m1fn_x2,
}
"""By safetensors' names. A header counts the elements of F4, torch counts bytes of two."""

_NUM_THREADS = 16
_REQUEST_BYTES = 2 << 20
"""What one system call reads: large tensors are cut into such pieces, small neighbors are read together."""
_REQUESTS_A_TASK = 32
"""Small requests that one thread does in a row, since handing over each costs more than reading it."""
_MAX_BUFFERS = 1024
"""Of one system call (IOV_MAX)."""
_INLINE_BYTES = 256 << 10
"""Fewer bytes, if they are one task, are read by the caller: a tiny model needs no threads."""
_CACHED_BYTES = 64 << 10
"""A smaller request leaves its pages to the end of the reader; dropping them one by one costs more than reading."""
_CACHED_FILE_BYTES = 16 << 20
"""Of a file from which less was read, small requests leave their pages cached for good."""
_PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass
class _File:
    path: Path
    descriptor: int
    bytes_read: int = 0


@dataclass
class _Request:
    """Adjacent bytes of a file, from ``offset``, and the memory that they go to."""

    file: _File
    offset: int
    num_bytes: int = 0
    buffers: list[tuple[str, memoryview]] = field(default_factory=list)
    """The name of a tensor, for messages, and memory for the next bytes."""

    def append(self, name: str, buffer: memoryview) -> None:
        self.buffers.append((name, buffer))
        self.num_bytes += len(buffer)

    def takes(self, file: _File, offset: int, num_bytes: int) -> bool:
        """Whether these bytes follow, and there is room for them."""
        is_next = file is self.file and offset == self.offset + self.num_bytes
        return is_next and self.num_bytes + num_bytes <= _REQUEST_BYTES and len(self.buffers) < _MAX_BUFFERS

    def read(self) -> None:
        """Read all of it, or raise `CheckpointError`."""
        offset, left = self.offset, self.buffers
        while left:
            name = left[0][0]
            try:
                count = os.preadv(self.file.descriptor, [buffer for _, buffer in left], offset)
            except OSError as error:
                raise CheckpointError(f"{self.file.path}: cannot read tensor {name}: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(
                    f"{self.file.path}: ends at byte {offset:,}, inside tensor {name}: it was truncated after it was "
                    "opened; download it again"
                )
            offset += count
            left = _after(left, count)
        if self.num_bytes >= _CACHED_BYTES:
            self._drop_pages()

    def _drop_pages(self) -> None:
        """The kernel drops whole pages of a range only, and neighbors may share the outer ones."""
        start = self.offset // _PAGE * _PAGE
        stop = -(-(self.offset + self.num_bytes) // _PAGE) * _PAGE
        os.posix_fadvise(self.file.descriptor, start, stop - start, os.POSIX_FADV_DONTNEED)


def _after(buffers: list[tuple[str, memoryview]], count: int) -> list[tuple[str, memoryview]]:
    """What is left of ``buffers`` when ``count`` bytes are there."""
    for index, (name, buffer) in enumerate(buffers):
        if count < len(buffer):
            return [(name, buffer[count:]), *buffers[index + 1 :]]
        count -= len(buffer)
    return []


class TensorReader:
    """The tensors of one or several checkpoints, as one `TensorSource`. Close it, or use it in a ``with`` statement.

    Files are opened, and threads are started, when they are needed first. Names must be in one checkpoint only.
    Several threads may read at once.
    """

    def __init__(self, *checkpoints: Checkpoint) -> None:
        for index, checkpoint in enumerate(checkpoints):
            for other in checkpoints[:index]:
                if twice := checkpoint.common_names(other):
                    raise CheckpointError(f"{listing(twice)}: in both {other.path} and {checkpoint.path}")
        self.checkpoints = checkpoints
        self._files: dict[tuple[int, str], _File] = {}
        self._row_descriptors: dict[Path, int] = {}
        """Of files of which rows are read: the kernel is told so, and must not read more than asked for."""
        self._pool: ThreadPoolExecutor | None = None
        self._lock = Lock()
        """Of the three above."""

    def describe(self, name: str) -> Described:
        checkpoint = self._owner(name)
        shape, dtype = checkpoint.shape(name), checkpoint.dtype(name)
        if dtype not in _DTYPES:
            raise CheckpointError(f"{checkpoint.path}: tensor {name} is {dtype}; known are {', '.join(_DTYPES)}")
        if dtype == "F4":
            shape = (*shape[:-1], shape[-1] // 2)
        return shape, _DTYPES[dtype]

    def start(self, reads: Sequence[Read]) -> Callable[[], None]:
        tasks = _tasks(list(self._requests(reads)))
        if len(tasks) <= 1 and sum(request.num_bytes for task in tasks for request in task) <= _INLINE_BYTES:
            for task in tasks:
                _run(task)
            return lambda: None
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tensor-reader")
            futures = [self._pool.submit(_run, task) for task in tasks]

        def wait() -> None:
            for future in futures:
                future.result()

        return wait

    def tensors(self, names: Sequence[str]) -> list[Tensor]:
        """Whole tensors, read together."""
        described = [self.describe(name) for name in names]
        tensors = [torch.empty(shape, dtype=dtype) for shape, dtype in described]
        self.start([Read(name, tensor) for name, tensor in zip(names, tensors, strict=True)])()
        return tensors

    def row_reader(self, names: Sequence[str]) -> RowReader:
        shape, dtype = self.describe(names[0])
        row_bytes = dtype.itemsize * math.prod(shape[1:])
        places = [self._place_of(name) for name in names]
        files = list({id(file): file for file, _ in places}.values())
        numbers = {id(file): number for number, file in enumerate(files)}
        file_of, begins = np.array([(numbers[id(file)], begin) for file, begin in places]).T
        with self._lock:
            opened = RowFiles([RowFile(file.path, self._reopen(file)) for file in files], row_bytes)
        return _FileRows(opened, file_of, begins, shape[1:], dtype)

    def close(self) -> None:
        """Wait for what was started, close the files, and drop what is left of large ones in the page cache."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
        for file in self._files.values():
            if file.bytes_read >= _CACHED_FILE_BYTES:
                os.posix_fadvise(file.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file.descriptor)
        self._files.clear()
        for descriptor in self._row_descriptors.values():
            os.close(descriptor)
        self._row_descriptors.clear()

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _owner(self, name: str) -> Checkpoint:
        found = next((checkpoint for checkpoint in self.checkpoints if name in checkpoint), None)
        if found is None:
            folders = " or ".join(str(checkpoint.path) for checkpoint in self.checkpoints)
            raise CheckpointError(f"no tensor {name} in the safetensors files of {folders}")
        return found

    def _requests(self, reads: Iterable[Read]) -> Iterator[_Request]:
        """System calls for ``reads``, in the order of the files' bytes."""
        located = [(*self._begin_of(read), read) for read in reads if read.out.numel()]
        located.sort(key=lambda entry: (entry[0].descriptor, entry[1]))
        request = None
        for file, begin, read in located:
            memory = _memory(read.out)
            file.bytes_read += len(memory)
            for start in range(0, len(memory), _REQUEST_BYTES):
                buffer = memory[start : start + _REQUEST_BYTES]
                if request is None or not request.takes(file, begin + start, len(buffer)):
                    if request is not None:
                        yield request
                    request = _Request(file, begin + start)
                request.append(read.name, buffer)
        if request is not None:
            yield request

    def _begin_of(self, read: Read) -> tuple[_File, int]:
        """The file of ``read`` and where in it its bytes begin."""
        file, begin = self._place_of(read.name)
        if read.rows is not None:
            shape, dtype = self.describe(read.name)
            begin += read.rows[0] * dtype.itemsize * math.prod(shape[1:])
        return file, begin

    def _place_of(self, name: str) -> tuple[_File, int]:
        """The file of a tensor and where in it its bytes begin."""
        checkpoint = self._owner(name)
        file, begin, _ = checkpoint.data_range(name)
        return self._file(checkpoint, file), begin

    def _file(self, checkpoint: Checkpoint, name: str) -> _File:
        """The file ``name`` of ``checkpoint``, opened at its first use."""
        key = (id(checkpoint), name)
        with self._lock:
            if key not in self._files:
                path = checkpoint.path / name
                try:
                    self._files[key] = _File(path, os.open(path, os.O_RDONLY | os.O_CLOEXEC))
                except OSError as error:
                    raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
            return self._files[key]

    def _reopen(self, file: _File) -> int:
        """A descriptor of its own for the same file, also if another has its name by now."""
        if file.path not in self._row_descriptors:
            self._row_descriptors[file.path] = os.open(f"/proc/self/fd/{file.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        return self._row_descriptors[file.path]


class _FileRows:
    """A `RowReader` of tensors in files: the file of each, where in it the tensor begins, and a row's form."""

    def __init__(
        self, files: RowFiles, file_of: np.ndarray, begins: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        self._files, self._file_of, self._begins, self._shape, self._dtype = files, file_of, begins, shape, dtype

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(file.path for file in self._files.files)

    def read(self, tensors: np.ndarray, rows: np.ndarray) -> Tensor:
        values = torch.from_numpy(self._files.read(*self._locate(tensors, rows)))
        return values.view(self._dtype).view(len(rows), *self._shape)

    def forget(self, tensors: np.ndarray, rows: np.ndarray) -> None:
        self._files.forget(*self._locate(tensors, rows))

    def use_threads(self) -> None:
        self._files.use_threads()

    def _locate(self, tensors: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self._file_of[tensors], self._begins[tensors] + self._files.row_bytes * rows


def _memory(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    assert tensor.is_contiguous(), "reads go to contiguous memory"
    return tensor.view(-1).view(torch.uint8).numpy().data


def _tasks(requests: list[_Request]) -> list[list[_Request]]:
    """What each thread does in a row."""
    tasks: list[list[_Request]] = []
    num_bytes = _REQUEST_BYTES
    for request in requests:
        if num_bytes + request.num_bytes > _REQUEST_BYTES or len(tasks[-1]) == _REQUESTS_A_TASK:
            tasks.append([])
            num_bytes = 0
        tasks[-1].append(request)
        num_bytes += request.num_bytes
    return tasks


def _run(requests: list[_Request]) -> None:
    """Read each and let go of its memory, so that it is free when its owner is told of the end and drops it."""
    while requests:
        requests.pop(0).read()
