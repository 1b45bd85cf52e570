"""Opens a folder of safetensors files: names, shapes, dtypes and offsets from the headers, and its identity."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from qwen4exp_trt.errors import CheckpointError
from qwen4exp_trt.runtime.file_identity import FileIdentity, identity_differences, sample_of
from qwen4exp_trt.runtime.json_files import read_json_object

INDEX_NAME = "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs"
_MAX_HEADER_BYTES = 100_000_000
"""The largest header that safetensors reads."""


class Checkpoint:
    """The tensors of the safetensors files of a folder. Only headers are read; `TensorReader` reads large tensors."""

    def __init__(self, path: Path, files: tuple[str, ...], tensors: dict[str, tuple[str, Any]]) -> None:
        self.path = path
        self.files = files
        """File names, sorted."""
        self._tensors = tensors
        """Tensor name -> the file that has it, opened."""
        self._offsets: dict[str, dict[str, tuple[int, int]]] = {}
        """File name -> tensor name -> the first byte of its data and the one behind it; of files that were asked for.

        Apart from the rest, since safetensors does not tell offsets, and parsing the headers once more takes longer
        than opening all files.
        """

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Read the header of each ``*.safetensors`` file directly in the folder ``path``.

        The folder is what counts: an index.json only has to agree that no file is missing. Raises `CheckpointError`
        for a folder without safetensors files, a missing shard, a truncated or damaged file, and a tensor that two
        files have.
        """
        folder = _checked_folder(path)
        paths = sorted(folder.glob("*.safetensors"))
        _check_index(folder, {file.name for file in paths})
        if not paths:
            raise CheckpointError(f"{folder}: no *.safetensors file in it; convert other formats first")
        return cls._of_files(folder, paths, "download it again")

    @classmethod
    def open_files(cls, path: str | Path, files: Iterable[str]) -> Checkpoint:
        """Read the headers of the named files of the folder ``path``, which were made by a build, and of no others.

        Raises `CheckpointError` for files that are missing, truncated or damaged, and for a tensor that two have.
        """
        folder, names = _checked_folder(path), sorted(files)
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise CheckpointError(f"{folder}: {listing(missing)} missing of {len(names)} files")
        return cls._of_files(folder, [folder / name for name in names], "remove it and build the bundle again")

    @classmethod
    def _of_files(cls, folder: Path, paths: list[Path], remedy: str) -> Checkpoint:
        tensors: dict[str, tuple[str, Any]] = {}
        for file in paths:
            handle = _open_file(file, remedy)
            names: list[str] = handle.keys()
            for name in names:
                if name in tensors:
                    raise CheckpointError(f"{folder}: tensor {name} is in both {tensors[name][0]} and {file.name}")
                tensors[name] = (file.name, handle)
        return cls(folder, tuple(file.name for file in paths), tensors)

    @property
    def names(self) -> list[str]:
        """All tensor names, sorted."""
        return sorted(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """The dtype in safetensors' spelling: ``BF16``, ``F32``, ``I64``, ``F8_E4M3`` ..."""
        return self._handle(name).get_slice(name).get_dtype()

    def tensor(self, name: str) -> Tensor:
        """The tensor, as a view of its memory-mapped file: for small ones, and for looking at a few values.

        Pages are read when they are used, one after another, and stay cached.
        """
        return self._handle(name).get_tensor(name)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def common_names(self, other: Checkpoint) -> list[str]:
        """The tensor names that both have, sorted."""
        return sorted(self._tensors.keys() & other._tensors.keys())

    def data_range(self, name: str) -> tuple[str, int, int]:
        """The name of the file of a tensor, the first byte of its data in it, and the one behind them."""
        self._handle(name)
        file = self._tensors[name][0]
        if file not in self._offsets:
            self._offsets[file] = _read_offsets(self.path / file)
        if name not in self._offsets[file]:
            raise CheckpointError(f"{self.path / file}: changed while it was open: tensor {name} is gone")
        return file, *self._offsets[file][name]

    def sample(self, name: str) -> bytes:
        """A hash of samples of a tensor's data."""
        file, start, end = self.data_range(name)
        return sample_of(self.path / file, start, end)

    def identity(self) -> dict[str, FileIdentity]:
        """File name -> what tells it from others; reads samples of every file."""
        return {name: FileIdentity.of(self.path / name) for name in self.files}

    def verify_identity(self, expected: Mapping[str, FileIdentity]) -> None:
        """Raise `CheckpointError` unless every file of ``expected`` (see `identity`) is there, with that identity."""
        if differences := identity_differences(self.path, expected):
            raise CheckpointError(
                f"{self.path} is not the checkpoint that was expected: {listing(differences)}; "
                "give that checkpoint, or build the bundle again from this one"
            )

    def _handle(self, name: str) -> Any:
        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: no tensor {name} in the {len(self.files)} safetensors files")
        return self._tensors[name][1]


def listing(items: Iterable[str], limit: int = 24) -> str:
    """The first ``limit`` items for a message, and how many more there are."""
    shown = list(items)
    more = f" and {len(shown) - limit} more" if len(shown) > limit else ""
    return ", ".join(shown[:limit]) + more


def _checked_folder(path: str | Path) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such folder; give the one that holds the *.safetensors files")
    return folder


def _check_index(folder: Path, present: set[str]) -> None:
    index = folder / INDEX_NAME
    if not index.exists():
        return
    weight_map = read_json_object(index, CheckpointError).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise CheckpointError(f"{index}: not a JSON object with a weight_map of shards")
    files = set(weight_map.values())
    if missing := sorted(files - present):
        raise CheckpointError(
            f"{folder}: {len(missing)} of the {len(files)} shards that {INDEX_NAME} names are missing: "
            f"{listing(missing)}; download them into the folder"
        )


def _open_file(path: Path, remedy: str) -> Any:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{path}: {_describe_damage(path)} ({error}); {remedy}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def _read_offsets(path: Path) -> dict[str, tuple[int, int]]:
    """Tensor name -> where its data begin and end in the file, whose header safetensors has checked."""
    try:
        with path.open("rb") as file:
            header_size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(header_size, _MAX_HEADER_BYTES)))
        data = 8 + header_size
        header.pop("__metadata__", None)
        offsets = {name: entry["data_offsets"] for name, entry in header.items()}
        return {name: (data + begin, data + end) for name, (begin, end) in offsets.items()}
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: changed while it was open: {error!r}") from error


def _describe_damage(path: Path) -> str:
    """What the sizes say about a file that safetensors refused."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            return f"a Git LFS pointer of {size:,} bytes, not the file itself"
        header_size = int.from_bytes(start[:8], "little")
        if 8 + header_size > size:
            return f"truncated or damaged: {size:,} bytes, but its header alone should take {8 + header_size:,}"
        if header_size > _MAX_HEADER_BYTES:
            return f"damaged: its header should take {header_size:,} bytes, more than the {_MAX_HEADER_BYTES:,} allowed"
        file.seek(8)
        header = file.read(header_size)
    try:
        ends = [entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__"]
        described = f"{8 + header_size + max(ends, default=0):,}"
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return f"damaged: {size:,} bytes, with a header that is not safetensors"
    return f"truncated or damaged: {size:,} bytes, but its header describes {described}"
