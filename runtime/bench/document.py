"""The one file that tells all of a run: JSON, described in ``docs/bench.md``."""

from __future__ import annotations

import hashlib
import math
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from qwen4exp_trt.runtime.bench.cases import Case, DecodeCase, GenerateCase, LeftOut
from qwen4exp_trt.runtime.bench.environment import CHECKOUT
from qwen4exp_trt.runtime.json_files import write_json
from qwen4exp_trt.runtime.manifest import ENGINE_FILE, MANIFEST_FILE, ONNX_FILE, CheckpointRef, Manifest

SCHEMA, SCHEMA_VERSION = "qwen4exp-bench", 2
"""The version rises whenever a field changes its meaning or goes away."""

RUNNING, COMPLETE, INTERRUPTED = "running", "complete", "interrupted"
"""States of a document. One that is still ``running`` is of a process that was killed."""
FAILED = "failed"


@dataclass
class Document:
    """What is known so far. `data` is what the file holds."""

    started: str
    """UTC, ISO 8601."""
    options: dict[str, Any]
    """That were given or chosen; of paths nothing."""
    state: str = RUNNING
    ended_by: str | None = None
    """What stopped a run that is not complete, in words."""
    ended_where: list[str] = field(default_factory=list)
    """The calls that led to an error: `frames_of`."""
    seconds: float = 0.0
    environment: dict[str, Any] = field(default_factory=dict)
    bundle: dict[str, Any] = field(default_factory=dict)
    rates: dict[str, Any] = field(default_factory=dict)
    load: dict[str, Any] = field(default_factory=dict)
    checked: dict[str, Any] | None = None
    generate: list[dict[str, Any]] = field(default_factory=list)
    decode: list[dict[str, Any]] = field(default_factory=list)
    prefill: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)
    failed: list[dict[str, Any]] = field(default_factory=list)
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def data(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "schema_version": SCHEMA_VERSION, **asdict(self)}

    def write(self, path: Path | None) -> None:
        """None: nowhere."""
        if path is not None:
            write_json(path, plain(self.data))

    def add(self, case: Case, measured: Mapping[str, Any]) -> None:
        """A measured case."""
        self.table_of(case).append({"case": describe_case(case), **measured})

    def leave_out(self, left_out: LeftOut) -> None:
        self.left_out.append({"what": str(left_out.case), "reason": left_out.reason})

    def fail(self, case: Case, reason: str, where: list[str]) -> None:
        self.failed.append({"what": str(case), "reason": reason, "where": where})

    def table_of(self, case: Case) -> list[dict[str, Any]]:
        if isinstance(case, DecodeCase):
            return self.decode
        return self.generate if isinstance(case, GenerateCase) else self.prefill


def describe_case(case: Case) -> dict[str, Any]:
    """Its sizes by name."""
    return plain(case)


def plain(value: Any) -> Any:
    """What JSON has: dataclasses as dicts, sets as lists, and so on all the way down."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no such number
    return value


def frames_of(error: BaseException) -> list[str]:
    """The calls that led to ``error``, outermost first: file (of this package from its root, of others the name alone),
    line and function."""
    frames = []
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename).resolve()
        name = path.relative_to(CHECKOUT).as_posix() if path.is_relative_to(CHECKOUT) else path.name
        frames.append(f"{name}:{frame.lineno} {frame.name}")
    return frames


def describe_bundle(folder: Path, manifest: Manifest) -> dict[str, Any]:
    """What the bundle is, without where it or its checkpoint are."""
    config = manifest.config
    return {
        "name": folder.resolve().name,
        "manifest_sha256": hashlib.sha256((folder / MANIFEST_FILE).read_bytes()).hexdigest(),
        "format_version": manifest.format_version,
        "package_version": manifest.package_version,
        "precision": manifest.precision,
        "ple_precision": manifest.ple_precision,
        "ple_residency": manifest.ple_residency,
        "activation_dtype": manifest.activation_dtype,
        "kv_cache_dtype": manifest.kv_cache_dtype,
        "target": manifest.target,
        "backend": manifest.backend,
        "kernel_targets": manifest.kernel_targets,
        "limits": asdict(manifest.limits),
        "activation_bytes": manifest.activation_bytes,
        "vocab_size": manifest.vocab_size,
        "draft_head_vocab_size": None if manifest.draft is None else manifest.draft.vocab_size,
        "config": {name: value for name, value in config.items() if isinstance(value, int | float | bool)},
        "checkpoint": _describe_files(manifest.checkpoint),
        "converted": _describe_files(manifest.converted),
        "tools": manifest.tools,
        "files": {name: asdict(ref) for name, ref in manifest.files.items() if name.endswith((ENGINE_FILE, ONNX_FILE))},
    }


def _describe_files(ref: CheckpointRef | None) -> dict[str, Any] | None:
    """How many files there are, and what distinguishes them from those of another checkpoint."""
    if ref is None:
        return None
    identity = repr(sorted((name, plain(file)) for name, file in ref.files.items()))
    return {"files": len(ref.files), "identity_sha256": hashlib.sha256(identity.encode()).hexdigest()}
