"""Checkpoints of random weights and the conversions that a precision asks of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from qwen4exp_trt.builder.convert import Conversion, ConvertedFolder
from qwen4exp_trt.builder.weight_plan import WeightPlan, plan_weights
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.weights import resolve_weights
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.tensor_reader import TensorReader


@dataclass(frozen=True)
class Planned:
    """A checkpoint and what is to be converted of it."""

    checkpoint: Checkpoint
    plan: WeightPlan
    conversions: list[Conversion]

    def convert(
        self,
        folder: ConvertedFolder,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Conversion]:
        """Convert what is missing; returns that."""
        missing = folder.missing(self.conversions)
        with TensorReader(self.checkpoint) as reader:
            folder.convert(missing, reader, progress)
        return missing


def plan_conversions_of(
    folder: Path, precision: str = "nvfp4", ple: str = "checkpoint", keep: tuple[str, ...] = ()
) -> Planned:
    config, checkpoint = ModelConfig.from_dir(folder), Checkpoint.open(folder)
    plan = plan_weights(config, resolve_weights(config, checkpoint).weights, precision, ple, keep)
    return Planned(checkpoint, plan, plan.conversions(checkpoint))


def contents(folder: Path) -> dict[str, str]:
    """A hash of every file of a folder."""
    return {path.name: sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
