"""Quantizes weights once, into files beside the bundle that later builds of the same checkpoint find again."""

from __future__ import annotations

import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from qwen4exp_trt.builder.bundle import PARTIAL, remove_stale, why_unwritable
from qwen4exp_trt.builder.plan_report import size
from qwen4exp_trt.builder.weight_bytes import num_matrices
from qwen4exp_trt.errors import BuildError, CheckpointError, PluginError
from qwen4exp_trt.frontend.stored_weights import Shape, StoredWeight
from qwen4exp_trt.plugins.number_formats import NVFP4_BLOCK, finite_amax, nvfp4_scale, quantize_nvfp4
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.file_identity import sample_of_memory
from qwen4exp_trt.runtime.materialize import read_rows
from qwen4exp_trt.runtime.progress_line import Progress
from qwen4exp_trt.runtime.recipe_shapes import RecipeShapes
from qwen4exp_trt.runtime.specs import Source, WeightRecipe, recipe_to_json
from qwen4exp_trt.runtime.tensor_source import TensorSource
from qwen4exp_trt.runtime.weight_formats import PACKED_FP4, Part, part_name
from qwen4exp_trt.runtime.weights import sources_of, transform

_CONVERTER = "nvfp4-1"
"""Changes whenever the same weight would become other bytes."""
_MAX_TABLE_FILES = 128
_PIECE_ELEMENTS = 1 << 22
"""What of a weight a thread quantizes at a time, in float32."""
_GPU_THREADS = 4
"""Enough to read beside computing; each holds some 200 MB of a GPU."""
_KEY = "key"
"""In the metadata of a file: the key that it was made for, and a hash of samples of what it holds."""

_T = TypeVar("_T")


@dataclass(frozen=True)
class Conversion:
    """A file to be: one weight in NVFP4, or some rows of an n-gram table."""

    weight: str
    """Canonical name."""
    value: WeightRecipe
    """The float weight."""
    shape: Shape
    """``[N, K]``, or ``[E, G*N, K]`` of experts."""
    num_scales: int
    """G: matrices of an expert, of which each has a scale; 1 for a matrix."""
    start: int
    """The first row of ``value`` that the file holds: its rows are ``start`` up to ``start + shape[0]``."""
    suffix: str
    """Of the names of its tensors."""
    key: str
    """A hash of all that decides the content."""

    @property
    def file(self) -> str:
        return f"{self.key}.safetensors"

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Of the tensors; a file has some more for its header."""
        scales = self.shape[0] * self.num_scales if len(self.shape) == 3 else 1
        return self.num_elements // 2 + self.num_elements // NVFP4_BLOCK + 4 * scales

    def tensor_name(self, part: Part) -> str:
        return part_name(self.weight, part) + self.suffix


def plan_conversions(
    weights: Mapping[str, StoredWeight], names: Sequence[str], tables: Sequence[str], checkpoint: Checkpoint
) -> list[Conversion]:
    """The files for the weights called ``names``, several for each of them that is in ``tables``.

    Reads samples of every tensor that they are made of.
    """
    conversions = []
    for name in names:
        weight = weights[name]
        origin = _hash_origin(weight.value, checkpoint)
        count = num_table_scales(weight.shape[0]) if name in tables else 1
        rows = weight.shape[0] // count
        for index in range(count):
            shape = (rows, *weight.shape[1:])
            described = (_CONVERTER, name, index * rows, shape, origin)
            key = hashlib.sha256(json.dumps(described).encode()).hexdigest()
            suffix = f".{index}" if name in tables else ""
            conversions.append(Conversion(name, weight.value, shape, num_matrices(name), index * rows, suffix, key))
    return conversions


def _hash_origin(value: WeightRecipe, checkpoint: Checkpoint) -> str:
    """A hash of the recipe, and of type and samples of each tensor that it reads, wherever that is."""
    digest = hashlib.sha256(json.dumps(recipe_to_json(value)).encode())
    for name in dict.fromkeys(sources_of(value)):
        digest.update(f"{name} {checkpoint.dtype(name)} {checkpoint.shape(name)}".encode())
        digest.update(checkpoint.sample(name))
    return digest.hexdigest()


def num_table_scales(num_rows: int) -> int:
    """The equal groups of rows into which an n-gram table is divided, a file and a scale for each."""
    return math.gcd(num_rows, _MAX_TABLE_FILES)


def converted_parts(conversions: Sequence[Conversion]) -> dict[Part, WeightRecipe]:
    """The parts of one weight from all its files."""
    parts: dict[Part, WeightRecipe] = {}
    for part in Part:
        sources = [Source(conversion.tensor_name(part)) for conversion in conversions]
        joined = sources[0] if len(sources) == 1 else transform("concat", *sources, dim=0)
        parts[part] = transform("view", joined, dtype=PACKED_FP4) if part is Part.CODES else joined
    return parts


# --- the files ------------------------------------------------------------------------------------------------------


class ConvertedFolder:
    """The folder of converted weights, which all bundles of a parent folder share; ``device`` converts them."""

    def __init__(self, path: Path, device: str = "cpu") -> None:
        self.path, self.device = path, device

    def missing(self, conversions: Sequence[Conversion]) -> list[Conversion]:
        """Those whose files are not there yet."""
        return [conversion for conversion in conversions if not (self.path / conversion.file).is_file()]

    def open(self, conversions: Sequence[Conversion]) -> Checkpoint:
        """The tensors of the files, which must be there.

        `BuildError` for a file that holds something else, `CheckpointError` for one that is truncated or damaged.
        """
        for conversion in conversions:
            self._check_key(conversion)
        return Checkpoint.open_files(self.path, {conversion.file for conversion in conversions})

    def _check_key(self, conversion: Conversion) -> None:
        path, names = self.path / conversion.file, [conversion.tensor_name(part) for part in Part]
        # Of a damaged file, `Checkpoint` says more.
        with suppress(SafetensorError), safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in names if name in file.keys()}  # noqa: SIM118
            if (file.metadata() or {}).get(_KEY) != _describe_content(conversion, tensors):
                raise BuildError(
                    f"{path}: does not hold the converted {conversion.weight}; remove it and build the bundle again"
                )

    def check_space(self, missing: Sequence[Conversion]) -> tuple[int, int]:
        """The bytes that ``missing`` will take and those that are free; `BuildError` if these are fewer."""
        needed = sum(conversion.num_bytes for conversion in missing)
        existing = next(folder for folder in (self.path, *self.path.resolve().parents) if folder.is_dir())
        free = shutil.disk_usage(existing).free
        if needed > free:
            raise BuildError(
                f"{self.path}: the converted weights need {size(needed)} more, and the disk has {size(free)}; choose a "
                "folder on another disk with --weights-dir"
            )
        return needed, free

    def convert(self, missing: Sequence[Conversion], source: TensorSource, progress: Progress) -> None:
        """Make the files of ``missing`` one after another; what is there when it is interrupted stays."""
        self._check_writable()
        remove_stale(self.path.glob(f".*{PARTIAL}"))
        total, done = sum(conversion.num_elements for conversion in missing), 0
        for conversion in missing:
            base = done
            tensors = quantize_weight(conversion, source, self.device, lambda n, b=base: progress(b + n, total))
            with _errors_of_disk(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                self._write(conversion, tensors)
            done += conversion.num_elements

    def _check_writable(self) -> None:
        if (why := why_unwritable(self.path)) is not None:
            raise BuildError(
                f"{self.path}: cannot write the converted weights: {why}; choose another folder with --weights-dir"
            )

    def _write(self, conversion: Conversion, tensors: Mapping[str, Tensor]) -> None:
        staging = self.path / f".{conversion.key}.{secrets.token_hex(4)}{PARTIAL}"
        try:
            # One entry: safetensors writes several in random order, and then equal weights would be different files.
            save_file(dict(tensors), staging, {_KEY: _describe_content(conversion, tensors)})
            with staging.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(staging, self.path / conversion.file)
        finally:
            staging.unlink(missing_ok=True)


def _describe_content(conversion: Conversion, tensors: Mapping[str, Tensor]) -> str:
    """The key of a conversion, and a hash of samples of its tensors."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(sample_of_memory(tensors[name].view(-1).view(torch.uint8).numpy().data))
    return f"{conversion.key} {digest.hexdigest()}"


@contextmanager
def _errors_of_disk(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise BuildError(
            f"{folder}: cannot write the converted weights: {error}; the finished files stay, so build again when "
            "that is solved"
        ) from error


# --- quantization ---------------------------------------------------------------------------------------------------


def quantize_weight(
    conversion: Conversion,
    source: TensorSource,
    device: str = "cpu",
    progress: Callable[[int], None] = lambda done: None,
) -> dict[str, Tensor]:
    """The tensors of a file by name, on the CPU: codes as bytes, block scales and scales.

    Reads and quantizes pieces of the weight in as many threads as there are cores; ``device`` (``cpu`` or ``cuda``)
    computes, and decides no bit. `CheckpointError` for a weight that NVFP4 cannot hold.
    """
    *rows, columns = conversion.shape
    codes = torch.empty((*rows, columns // 2), dtype=torch.uint8)
    block_scales = torch.empty((*rows, columns // NVFP4_BLOCK), dtype=torch.float8_e4m3fn)

    shapes = RecipeShapes(source)

    def read(start: int, stop: int) -> Tensor:
        rows = (conversion.start + start, conversion.start + stop)
        return read_rows(conversion.value, source, *rows, device, shapes=shapes).float()

    def quantize_experts(start: int, stop: int) -> None:
        for expert, matrices in zip(range(start, stop), read(start, stop), strict=True):
            for index, matrix in enumerate(matrices.chunk(conversion.num_scales)):
                part = slice(index * len(matrix), (index + 1) * len(matrix))
                packed, blocks, scale = quantize_nvfp4(matrix)
                codes[expert, part], block_scales[expert, part], scales[expert, index] = packed, blocks, scale

    def quantize_matrix_rows(start: int, stop: int) -> None:
        codes[start:stop], block_scales[start:stop], _ = quantize_nvfp4(read(start, stop), scales[0].to(device))

    pieces = list(_pieces(conversion.shape))
    try:
        if len(rows) == 2:
            scales = torch.empty(rows[0], conversion.num_scales)
            _run_pieces(quantize_experts, pieces, conversion.shape, device, progress)
        else:
            amax = _run_pieces(lambda start, stop: finite_amax(read(start, stop)), pieces, conversion.shape, device)
            scales = nvfp4_scale(max(amax)).reshape(1)
            _run_pieces(quantize_matrix_rows, pieces, conversion.shape, device, progress)
    except PluginError as error:
        raise CheckpointError(f"{conversion.weight}: {error}") from error
    tensors = {Part.CODES: codes, Part.BLOCK_SCALES: block_scales, Part.SCALES: scales}
    return {conversion.tensor_name(part): tensor for part, tensor in tensors.items()}


def _pieces(shape: Shape) -> Iterator[tuple[int, int]]:
    """Ranges of the first dim that a thread takes at a time."""
    step = max(1, _PIECE_ELEMENTS // math.prod(shape[1:]))
    return ((start, min(start + step, shape[0])) for start in range(0, shape[0], step))


def _run_pieces(
    work: Callable[[int, int], _T],
    pieces: Sequence[tuple[int, int]],
    shape: Shape,
    device: str,
    progress: Callable[[int], None] = lambda done: None,
) -> list[_T]:
    """``work`` of each piece, in order; ``progress`` is told the elements that are done."""
    results: list[_T] = []
    num_threads = os.cpu_count() if device == "cpu" else _GPU_THREADS
    with _one_thread_an_op(), ThreadPoolExecutor(num_threads) as pool:
        futures = [pool.submit(work, *piece) for piece in pieces]
        try:
            for future, (_, stop) in zip(futures, pieces, strict=True):
                results.append(future.result())
                progress(stop * math.prod(shape[1:]))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return results


@contextmanager
def _one_thread_an_op() -> Iterator[None]:
    """The threads here are enough: each op would bring as many again."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
