"""What must hold before a bundle's engine is deserialized and its weights are read: each check has its own message."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.plugins.registry import plugin_specs
from qwen4exp_trt.plugins.spec import NAMESPACE
from qwen4exp_trt.plugins.tensorrt import register_creators
from qwen4exp_trt.runtime.checkpoint import listing
from qwen4exp_trt.runtime.json_files import read_json_object
from qwen4exp_trt.runtime.manifest import (
    DRAFT_DIR,
    ENGINE_FILE,
    LAYERS_FILE,
    ONNX_FILE,
    PROGRAM_DIR,
    FileRef,
    Manifest,
)
from qwen4exp_trt.runtime.program_text import GRAPH_FILE, TABLES_FILE

ENGINE_HASH, BUILT_FROM = "engine_sha256", "built_from_sha256"
"""Of a layer report: the engine that it is of, and the program and ONNX that this was built from."""


def engine_label(engine: bytes, part: Path) -> dict[str, str]:
    """What ties ``engine`` to the program and ONNX in ``part``, the bundle or the draft head's folder in it."""
    return {ENGINE_HASH: hashlib.sha256(engine).hexdigest(), BUILT_FROM: _hash_of_sources(part)}


def check_engine_fits(trt: ModuleType, folder: Path, manifest: Manifest, device: torch.device) -> None:
    """`BundleError` unless the engines of the bundle ``folder`` are whole and its own, and ``trt``, the GPU and the
    registered plugins are those that they were built for."""
    _check_module(trt, folder, manifest)
    _check_gpu(folder, manifest, device)
    _check_plugins(trt, folder, manifest)
    for part in ("", DRAFT_DIR) if manifest.draft is not None else ("",):
        _check_file(folder, manifest, part)


def _check_module(trt: ModuleType, folder: Path, manifest: Manifest) -> None:
    if manifest.target is None:
        raise BundleError(
            f"{folder}: has no engine, as it was built with {manifest.activation_dtype} activations; use the backend "
            "'eager', or build it with --activation-dtype bfloat16"
        )
    built_by, ours = manifest.tools.get(trt.__name__), trt.__version__
    if built_by is None:
        raise BundleError(
            f"{folder}: its engine was built by the TensorRT package {manifest.backend}, this is {trt.__name__} "
            f"{ours}; use the backend {manifest.backend!r}, or build the bundle again with this one"
        )
    if built_by != ours:
        raise BundleError(
            f"{folder}: its engine was built by {trt.__name__} {built_by}, this is {trt.__name__} {ours}; build the "
            "bundle again with this version, or install that one"
        )


def _check_gpu(folder: Path, manifest: Manifest, device: torch.device) -> None:
    if device.type != "cuda":
        return
    own = "sm{}{}".format(*torch.cuda.get_device_capability(device))
    if own != manifest.target:
        raise BundleError(
            f"{folder}: its engine is for {manifest.target}, this GPU ({torch.cuda.get_device_name(device)}) is "
            f"{own}; build the bundle with --target {own}, or use the backend 'eager'"
        )


def _check_plugins(trt: ModuleType, folder: Path, manifest: Manifest) -> None:
    """The manifest has the versions that the engine was built with; TensorRT makes plugins by name and version."""
    register_creators(trt)
    registry, missing = trt.get_plugin_registry(), []
    for spec in plugin_specs().values():
        version = manifest.plugins.get(spec.name)
        if version is not None and registry.get_creator(spec.onnx_op_type, str(version), NAMESPACE) is None:
            missing.append(f"{spec.onnx_op_type} version {version} (registered is {spec.version})")
    if missing:
        raise BundleError(
            f"{folder}: its engine needs plugins that {trt.__name__}'s registry does not have: {listing(missing)}; "
            "build the bundle again"
        )


def _check_file(folder: Path, manifest: Manifest, part: str) -> None:
    """The engine against the layer report beside it, which says what it was built from, and against the manifest."""
    place = folder / part
    path, name = place / ENGINE_FILE, f"{part}/{ENGINE_FILE}".lstrip("/")
    if not path.is_file():
        raise BundleError(f"{path}: is missing; build the bundle again")
    found, label = FileRef.of(path).sha256, _read_label(place / LAYERS_FILE)
    if label[ENGINE_HASH] != found:
        raise BundleError(
            f"{path}: its sha256 is {found[:16]}, but {LAYERS_FILE} is the report of the engine "
            f"{label[ENGINE_HASH][:16]}: it is damaged, or another engine was put in its place; build the bundle again"
        )
    sources = _hash_of_sources(place)
    if label[BUILT_FROM] != sources:
        raise BundleError(
            f"{path}: was built from another program (sha256 of program and ONNX {label[BUILT_FROM][:16]}) than the "
            f"one in {place} ({sources[:16]}): files of two bundles are mixed; build the bundle again"
        )
    expected = manifest.files.get(name)
    if expected is None or expected.sha256 != found:
        recorded = "lists none" if expected is None else f"has {expected.sha256[:16]}"
        raise BundleError(
            f"{path}: is the engine of another build of this program: its sha256 is {found[:16]}, the manifest "
            f"{recorded}; build the bundle again"
        )


def _read_label(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise BundleError(f"{path}: is missing, so nothing says what the engine was built from; build the bundle again")
    label = read_json_object(path, BundleError)
    if any(not isinstance(label.get(key), str) for key in (ENGINE_HASH, BUILT_FROM)):
        raise BundleError(f"{path}: damaged, it does not say what the engine was built from; build the bundle again")
    return label


def _hash_of_sources(part: Path) -> str:
    """Of the files that an engine is built from, by name."""
    digests = {}
    for name in (f"{PROGRAM_DIR}/{GRAPH_FILE}", f"{PROGRAM_DIR}/{TABLES_FILE}", ONNX_FILE):
        path = part / name
        digests[name] = FileRef.of(path).sha256 if path.is_file() else None
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()
