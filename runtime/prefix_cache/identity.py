"""What cached states belong to: they are of use to nobody whose answer here differs."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from typing import Any

from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.prefix_cache.blob import FORMAT_VERSION
from qwen4exp_trt.runtime.prefix_cache.radix_tree import KEY_BYTES

_COMPUTED_BY = (
    "package_version",
    "plugins",
    "config",
    "precision",
    "ple_precision",
    "ple_residency",
    "activation_dtype",
    "kv_cache_dtype",
    "calibration",
    "draft",
)
"""The fields of a manifest that say how states are computed; its programs' files say it as well."""


def cache_identity(manifest: Manifest, backend: str, device: str, states: Any) -> bytes:
    """A digest of the model, of what computes it, and of the ``states`` (JSON) that are kept."""
    data = asdict(manifest)
    programs = {name: file for name, file in data["files"].items() if name.split("/")[-2:-1] == ["program"]}
    weights = [None if data[name] is None else data[name]["files"] for name in ("checkpoint", "converted")]
    computed_by = {name: data.get(name) for name in _COMPUTED_BY}
    parts = [FORMAT_VERSION, computed_by, programs, weights, backend, device, states]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=KEY_BYTES).digest()
