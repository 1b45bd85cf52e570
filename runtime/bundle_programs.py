"""The programs of a bundle: the model's, and that of its draft head."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.manifest import DRAFT_DIR, PROGRAM_DIR, TOKEN_IDS_FILE, Manifest
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.program_text import load_program
from qwen4exp_trt.runtime.specs import WeightSpec


def load_programs(folder: Path, manifest: Manifest, with_draft_head: bool) -> list[Program]:
    """The model's, and if asked for that of the draft head."""
    if with_draft_head and manifest.draft is None:
        raise BundleError(
            f"{folder}: has no draft head; build it from a checkpoint that has one (tensors mtp.*), without "
            "--draft-head none"
        )
    parts = (folder, folder / DRAFT_DIR) if with_draft_head else (folder,)
    return [load_program(part / PROGRAM_DIR) for part in parts]


def distinct_weights(folder: Path, programs: Sequence[Program]) -> list[WeightSpec]:
    """The weights of all ``programs``, each once: what has one name must be the same."""
    specs: dict[str, WeightSpec] = {}
    for program in programs:
        for spec in program.weights:
            if specs.setdefault(spec.name, spec) != spec:
                raise BundleError(f"{folder}: its programs have different weights {spec.name}; build the bundle again")
    return list(specs.values())


def load_token_ids(folder: Path, manifest: Manifest) -> Tensor | None:
    """The ids that the columns of the draft head's logits stand for; None if they are all ids."""
    if manifest.draft is None or not manifest.draft.has_token_ids:
        return None
    path, size = folder / TOKEN_IDS_FILE, manifest.draft.vocab_size
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BundleError(f"{path}: cannot read the draft head's token ids: {error}") from error
    is_list = isinstance(ids, list) and len(ids) == size and all(type(token) is int for token in ids)
    if not is_list or ids != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < manifest.vocab_size:
        raise BundleError(f"{path}: not {size} ascending token ids below {manifest.vocab_size}; build the bundle again")
    return torch.tensor(ids)
