"""What executes the program: the small interface of all backends, and the eager one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.checkpoint import Checkpoint, listing
from qwen4exp_trt.runtime.file_identity import identity_differences
from qwen4exp_trt.runtime.manifest import PROGRAM_DIR, CheckpointRef, Manifest
from qwen4exp_trt.runtime.materialize import load_weights
from qwen4exp_trt.runtime.program_text import load_program
from qwen4exp_trt.runtime.progress_line import Progress
from qwen4exp_trt.runtime.specs import NUM_BLOCKS, NUM_SLOTS, StateSpec, extent_of
from qwen4exp_trt.runtime.tensor_reader import TensorReader
from qwen4exp_trt.runtime.weights import dtype_from_name

logger = logging.getLogger(__name__)

BACKENDS = ("eager",)


class Backend(Protocol):
    """Runs steps over states that it owns."""

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run one step, update the states, and return float32 logits ``[L, vocab_size]``."""
        ...


class EagerBackend:
    """The bundle's program itself, op by op in torch. Runs on the CPU in this version."""

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        checkpoint: Path | None,
        num_blocks: int,
        progress: Progress | None = None,
    ) -> None:
        self.program = load_program(folder / PROGRAM_DIR)
        files = open_weight_files(folder, manifest, checkpoint)
        # First, so that a lack of memory shows before weights are read for minutes.
        self.states = allocate_states(self.program.states, num_blocks, manifest.limits.num_slots)
        logger.info("loading %d weights from %s", len(self.program.weights), ", ".join(str(f.path) for f in files))
        with TensorReader(*files) as reader:
            self.weights = load_weights(self.program.weights, reader, progress=progress)

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        return self.program.run(inputs, self.states, self.weights)["logits"].float()


def make_backend(
    name: str,
    device: str,
    folder: Path,
    manifest: Manifest,
    checkpoint: Path | None,
    num_blocks: int,
    progress: Progress | None = None,
) -> Backend:
    """The backend called ``name``, loaded; `BundleError` for one that this version lacks."""
    if name not in BACKENDS:
        raise BundleError(f"backend {name!r} cannot execute in this version; available: {', '.join(BACKENDS)}")
    if device != "cpu":
        raise BundleError(f"device {device!r}: the ops have no kernels for it in this version; use device 'cpu'")
    return EagerBackend(folder, manifest, checkpoint, num_blocks, progress)


def open_weight_files(folder: Path, manifest: Manifest, checkpoint: Path | None) -> list[Checkpoint]:
    """The checkpoint that the bundle was built from and what was converted from it; the files of both are checked."""
    opened = open_checkpoint(folder, manifest.checkpoint, checkpoint)
    return [opened] if manifest.converted is None else [opened, _open_converted(folder, manifest.converted)]


def open_checkpoint(folder: Path, ref: CheckpointRef | None, override: Path | None) -> Checkpoint:
    """The checkpoint that the bundle was built from, at its recorded path or at ``override``; its files are checked."""
    if ref is None:
        raise BundleError(f"{folder}: built with --config-only, so it has no weights; build it from the checkpoint")
    if override is None and not Path(ref.path).is_dir():
        raise BundleError(
            f"{folder}: the checkpoint that it was built from is no longer at {ref.path}; say where it is now with "
            "--checkpoint (checkpoint=...)"
        )
    checkpoint = Checkpoint.open(override or ref.path)
    checkpoint.verify_identity(ref.files)
    return checkpoint


def _open_converted(folder: Path, ref: CheckpointRef) -> Checkpoint:
    """At its recorded path, or beside a bundle that was moved together with it."""
    places = list(dict.fromkeys((Path(ref.path), folder.resolve().parent / Path(ref.path).name)))
    problems = {}
    for place in filter(Path.is_dir, places):
        problems[place] = identity_differences(place, ref.files)
        if not problems[place]:
            return Checkpoint.open_files(place, ref.files)
    for place, differences in problems.items():
        raise BundleError(
            f"{folder}: its converted weights in {place} are not those that it was built with: {listing(differences)}; "
            "remove such files and build the bundle again"
        )
    where = " or ".join(map(str, places))
    raise BundleError(f"{folder}: its converted weights are not at {where}; move them there, or build the bundle again")


def allocate_states(specs: tuple[StateSpec, ...], num_blocks: int, num_slots: int) -> dict[str, Tensor]:
    """Every state buffer by name, filled with its initial value; `BundleError` if there is no memory for them."""
    extents = {NUM_BLOCKS: num_blocks, NUM_SLOTS: num_slots}
    shapes = [[extent_of(dim, extents) for dim in spec.shape] for spec in specs]
    try:
        return {
            spec.name: torch.full(shape, spec.init, dtype=dtype_from_name(spec.dtype))
            for spec, shape in zip(specs, shapes, strict=True)
        }
    except RuntimeError as error:
        needed = sum(spec.row_bytes * shape[0] for spec, shape in zip(specs, shapes, strict=True))
        raise BundleError(
            f"cannot allocate {needed / 2**30:,.1f} GiB for the states of {num_slots} sequences and {num_blocks} "
            f"pages; load the bundle with a smaller num_blocks: {error}"
        ) from error
