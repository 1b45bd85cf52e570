"""``manifest.json``: what a bundle is, what it was made from and by what, and the files that it must hold."""

from __future__ import annotations

import hashlib
import json
import operator
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from qwen4exp_trt import __version__
from qwen4exp_trt.errors import BuildError, BundleError
from qwen4exp_trt.plugins.registry import op_versions
from qwen4exp_trt.runtime.calibration import Calibration
from qwen4exp_trt.runtime.checkpoint import Checkpoint, listing
from qwen4exp_trt.runtime.file_identity import FileIdentity
from qwen4exp_trt.runtime.json_files import read_json_object
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.program_text import GRAPH_FILE, TABLES_FILE
from qwen4exp_trt.runtime.specs import TensorSpec

MANIFEST_FILE = "manifest.json"
PROGRAM_DIR = "program"
ENGINE_FILE = "decoder.engine"
ONNX_FILE = "decoder.onnx"
LAYERS_FILE = "layers.json"
KERNELS_DIR = "kernels"
JIT_CACHE_DIR = "jit_cache"
"""What TensorRT for RTX compiled when the bundle ran, if it was asked to keep it here: no file of the build."""
DRAFT_DIR = "mtp"
"""The draft head's program, ONNX, engine and layers, under the names that those of the model have beside it."""
TOKEN_IDS_FILE = f"{DRAFT_DIR}/token_ids.json"
"""The ids that the columns of a draft head's logits stand for, ascending; only there if they are not all."""

DEBUG_DIMS = ("T", "L")
"""The dynamic dims that a debug output may have."""

FORMAT_VERSION = 3

_T = TypeVar("_T")


@dataclass(frozen=True)
class CheckpointRef:
    """A folder with files whose tensors the weight recipes read, and the identity of each file."""

    path: str
    files: dict[str, FileIdentity]

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> CheckpointRef:
        return cls(str(checkpoint.path.resolve()), checkpoint.identity())

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CheckpointRef:
        files = {name: _check_types(FileIdentity(**identity)) for name, identity in data["files"].items()}
        return cls(data["path"], files)


@dataclass(frozen=True)
class FileRef:
    """Size and content hash of a file of the bundle."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileRef:
        with path.open("rb") as file:
            return cls(path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest())


@dataclass(frozen=True, kw_only=True)
class DraftHead:
    """The bundle's draft head."""

    vocab_size: int
    """Columns of its logits."""
    has_token_ids: bool
    """Whether they stand for some ids only, those in `TOKEN_IDS_FILE`."""
    profiles: dict[str, Any]
    """Of its engine, in engine order."""
    debug_outputs: tuple[TensorSpec, ...]
    """As those of `Manifest`."""
    passes: list[dict[str, Any]]

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DraftHead:
        return cls(**{**data, "debug_outputs": _debug_outputs_from_json(data)})


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The contract between builder and runtime. States and weight recipes are in the program's tables."""

    format_version: int = FORMAT_VERSION
    package_version: str = __version__
    config: dict[str, Any]
    precision: str
    """What was asked for the weights, as ``qwen4exp-build --precision`` has it."""
    ple_precision: str
    """The same for the n-gram table."""
    ple_residency: str
    """Where the n-gram table is at run time: ``device``, ``host`` or ``disk``."""
    host_weights: list[str]
    """Weights of the program that stay in the host's memory, mapped into the GPU's addresses."""
    activation_dtype: str
    kv_cache_dtype: str
    weights: list[dict[str, Any]]
    """What became of them: the rows of `builder.weight_table`."""
    calibration: Calibration | None
    """The scales of quantized activations."""
    target: str | None
    """The GPU that the engine is for; None for a bundle without an engine."""
    backend: str | None
    """The TensorRT package that built the engine."""
    kernel_targets: list[str]
    """The GPU architectures that it has compiled CUDA kernels for."""
    limits: EngineLimits
    activation_bytes: int
    """Of the intermediate results of the largest step: what the build of the engine told, or an estimate."""
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    checkpoint: CheckpointRef | None
    """None for a bundle built from a config alone, which has no weights."""
    converted: CheckpointRef | None
    """The files of weights that were quantized at the build; None if there are none."""
    plugins: dict[str, int]
    """Version of every op that the program may call."""
    profiles: dict[str, Any]
    debug_outputs: tuple[TensorSpec, ...]
    """What the engine gives besides the program's outputs: values that plugins read, by their names in the ONNX, in the
    order in which they are computed. Empty unless the build was asked for them."""
    passes: list[dict[str, Any]]
    draft: DraftHead | None
    """None for a bundle without a draft head."""
    tools: dict[str, str]
    files: dict[str, FileRef]

    @property
    def all_debug_outputs(self) -> tuple[TensorSpec, ...]:
        """Those of the draft head's engine too."""
        return self.debug_outputs + (() if self.draft is None else self.draft.debug_outputs)

    def save(self, folder: Path) -> None:
        text = json.dumps(asdict(self), indent=1) + "\n"
        (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read the manifest of a bundle; `BundleError` when it is absent, damaged or of another version."""
        if not folder.is_dir():
            raise BundleError(f"{folder}: no such folder; give a bundle that qwen4exp-build made")
        path = folder / MANIFEST_FILE
        if not path.is_file():
            raise BundleError(f"{folder}: not a bundle, it has no {MANIFEST_FILE}; make one with qwen4exp-build")
        data = read_json_object(path, BundleError)
        try:
            _check_versions(path, data)
            return cls._from_json(data)
        except (KeyError, TypeError, ValueError, AttributeError, BuildError) as error:
            raise BundleError(f"{path}: damaged ({error!r}); build the bundle again") from error

    @classmethod
    def _from_json(cls, data: Mapping[str, Any]) -> Manifest:
        values = dict(data)
        kinds = {
            "checkpoint": CheckpointRef,
            "converted": CheckpointRef,
            "calibration": Calibration,
            "draft": DraftHead,
        }
        for name, kind in kinds.items():
            values[name] = None if values[name] is None else _check_types(kind.from_json(values[name]))
        values["debug_outputs"] = _debug_outputs_from_json(values)
        values["limits"] = EngineLimits(**values["limits"])
        values["stop_token_ids"] = tuple(map(operator.index, values["stop_token_ids"]))
        values["files"] = {name: FileRef(**ref) for name, ref in values["files"].items()}
        return _check_types(cls(**values))

    def check_files(self, folder: Path) -> None:
        """`BundleError` naming every file that is missing, not the one that was built, or not in ``files``."""
        # Names that lead out of the folder are never found.
        paths = [path for path in folder.rglob("*") if path.is_file() and path.parent != folder / JIT_CACHE_DIR]
        found = {path.relative_to(folder).as_posix() for path in paths} - {MANIFEST_FILE}
        problems = []
        for name in sorted(found | self.files.keys() | self._required_files()):
            path, ref = folder / name, self.files.get(name)
            if name not in found:
                problems.append(f"{name} is missing")
            elif ref is None:
                problems.append(f"{name} is not in its list of files")
            elif path.stat().st_size != ref.size or FileRef.of(path) != ref:
                problems.append(f"{name} was changed after the build")
        if problems:
            raise BundleError(f"{folder}: damaged bundle: {listing(problems)}; build it again")

    def _required_files(self) -> set[str]:
        """What a bundle cannot be without."""
        names = {f"{PROGRAM_DIR}/{GRAPH_FILE}", f"{PROGRAM_DIR}/{TABLES_FILE}"}
        if self.target is not None:
            names |= {ENGINE_FILE, LAYERS_FILE}
        if self.draft is not None:
            names |= {f"{DRAFT_DIR}/{name}" for name in names}
            names |= {TOKEN_IDS_FILE} if self.draft.has_token_ids else set()
        return names


def _debug_outputs_from_json(data: Mapping[str, Any]) -> tuple[TensorSpec, ...]:
    try:
        return tuple(TensorSpec.from_json(spec, DEBUG_DIMS) for spec in data["debug_outputs"])
    except BundleError as error:
        raise ValueError(f"debug_outputs: {error}") from error


def _check_types(instance: _T) -> _T:
    """``instance``; TypeError for a field that is not of its declared class."""
    for name, hint in get_type_hints(type(instance)).items():
        hints = get_args(hint) if isinstance(hint, UnionType) else (hint,)
        classes = tuple(get_origin(part) or part for part in hints)
        if not isinstance(getattr(instance, name), classes):
            raise TypeError(f"{name} is {getattr(instance, name)!r}")
    return instance


def _check_versions(path: Path, data: Mapping[str, Any]) -> None:
    found = (data["format_version"], data["package_version"])
    if found != (FORMAT_VERSION, __version__):
        raise BundleError(
            f"{path}: made by qwen4exp-trt {found[1]} (bundle format {found[0]}), this is {__version__} "
            f"(format {FORMAT_VERSION}); build the bundle again"
        )
    versions = op_versions()
    found = data["plugins"]
    if found != versions:
        differing = sorted(name for name in versions | found if versions.get(name) != found.get(name))
        described = [
            f"{name} (version {found.get(name, 'none')}, here {versions.get(name, 'none')})" for name in differing
        ]
        raise BundleError(f"{path}: its ops {', '.join(described)} have other versions here; build the bundle again")
