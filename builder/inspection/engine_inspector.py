"""What an engine says of its layers where it can be loaded, merged into what the builder reported of them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from qwen4exp_trt.builder.inspection.bundle import DRAFT_HEAD
from qwen4exp_trt.builder.inspection.document import Engine, Inspection
from qwen4exp_trt.builder.layers import split_profile_mark
from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.load_options import CudaGraphs
from qwen4exp_trt.runtime.manifest import DRAFT_DIR, ENGINE_FILE, Manifest
from qwen4exp_trt.runtime.streams import Stream
from qwen4exp_trt.runtime.tensorrt.engine_checks import check_engine_fits
from qwen4exp_trt.runtime.tensorrt.jit_cache import JitCache
from qwen4exp_trt.runtime.tensorrt.module import load_trt
from qwen4exp_trt.runtime.tensorrt.session import Session


def with_inspector(
    inspection: Inspection,
    folder: Path,
    device: torch.device,
    make_stream: Callable[[torch.device], Stream],
    trt: ModuleType | None = None,
) -> Inspection:
    """The ``inspection`` of the bundle ``folder`` with what its engines say on ``device``, layer by layer.

    BundleError if the bundle has no engine, or the engine cannot be loaded there.
    """
    manifest = Manifest.load(folder)
    if manifest.backend is None:
        raise BundleError(f"{folder}: has no engine to load; build it with --activation-dtype bfloat16")
    trt = trt or load_trt(manifest.backend)
    check_engine_fits(trt, folder, manifest, device)
    parts = []
    for part in inspection.parts:
        path = (folder / DRAFT_DIR if part.name == DRAFT_HEAD else folder) / ENGINE_FILE
        session = Session(trt, path, device, make_stream(device), CudaGraphs.OWN, JitCache(None))
        try:
            layers = read_layers(trt, session.engine, path)
        finally:
            session.close()
        assert part.engine is not None
        parts.append(replace(part, engine=merge_layers(part.engine, layers)))
    return replace(inspection, parts=parts)


def read_layers(trt: ModuleType, engine: Any, path: Path) -> list[dict[str, Any]]:
    """The layers that the inspector of ``engine`` tells; `BundleError` if it does not tell them."""
    inspector = engine.create_engine_inspector()
    text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    try:
        layers = json.loads(text)["Layers"]
        return [layer if isinstance(layer, dict) else {"Name": str(layer)} for layer in layers]
    except (ValueError, TypeError, KeyError) as error:
        found = str(text)[:80]
        raise BundleError(f"{path}: the engine's inspector tells no layers as JSON ({error!r}): {found!r}") from error


def merge_layers(engine: Engine, told: Sequence[Mapping[str, Any]]) -> Engine:
    """``engine`` with what the inspector has ``told`` at the layers of those names.

    In every profile but the first it marks names; layers that share one are taken in the order of their profiles.
    """
    by_name: dict[str, list[tuple[int, dict[str, Any]]]] = defaultdict(list)
    for layer in told:
        name, profile = split_profile_mark(str(layer.get("Name", "")))
        by_name[name].append((profile, dict(layer)))
    for same in by_name.values():
        same.sort(key=lambda each: each[0])  # stable
    layers, missing = [], []
    for layer in engine.layers:
        found = by_name[layer.name].pop(0)[1] if by_name[layer.name] else None
        if found is None:
            missing.append(f"{layer.name} ({layer.profile})")
        layers.append(replace(layer, inspector=found))
    more = [layer for same in by_name.values() for _, layer in same]
    return replace(engine, layers=layers, only_inspector=more, only_report=missing)
