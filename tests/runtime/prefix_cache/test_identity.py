from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from manifests import make_manifest

from qwen4exp_trt.runtime.file_identity import FileIdentity
from qwen4exp_trt.runtime.manifest import CheckpointRef, FileRef, Manifest
from qwen4exp_trt.runtime.prefix_cache.identity import cache_identity

STATES = [16, [["layers.0.kv_cache", "bfloat16", [2, 3]]]]


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return make_manifest(tmp_path)


def identity(manifest: Manifest, backend: str = "eager", device: str = "cpu", states: Any = STATES) -> bytes:
    return cache_identity(manifest, backend, device, states)


def test_whatever_computes_states_tells_caches_apart(manifest: Manifest) -> None:
    assert manifest.checkpoint is not None
    weights = {name: FileIdentity(file.size, "fine-tuned") for name, file in manifest.checkpoint.files.items()}
    program = {**manifest.files, "program/graph.py": FileRef(1, "other")}
    others = [
        replace(manifest, checkpoint=CheckpointRef("elsewhere", weights)),
        replace(manifest, converted=CheckpointRef("elsewhere", weights)),
        replace(manifest, files=program),
        replace(manifest, files={**manifest.files, "mtp/program/graph.py": FileRef(1, "other")}),
        replace(manifest, package_version="9"),
        replace(manifest, plugins={**manifest.plugins, "moe": 99}),
        replace(manifest, activation_dtype="float32"),
        replace(manifest, kv_cache_dtype="bfloat16"),
        replace(manifest, precision="bf16"),
        replace(manifest, draft=None),
        replace(manifest, calibration=None),
    ]
    identities = [identity(manifest), *map(identity, others)]
    identities += [identity(manifest, backend="tensorrt"), identity(manifest, device="cuda")]
    identities += [identity(manifest, states=[8, STATES[1]]), identity(manifest, states=[16, []])]
    assert len(set(identities)) == len(identities)


def test_what_computes_no_states_does_not(manifest: Manifest) -> None:
    assert manifest.checkpoint is not None
    moved = replace(
        manifest,
        checkpoint=CheckpointRef("elsewhere", manifest.checkpoint.files),
        files={**manifest.files, "tokenizer.json": FileRef(1, "other")},
        stop_token_ids=(1,),
        limits=replace(manifest.limits, max_batch_size=1),
    )
    assert identity(moved) == identity(manifest)
