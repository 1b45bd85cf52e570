"""The weights of a build: the files that they are in, and recipes over those for what a program asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from qwen4exp_trt.builder.convert import ConvertedFolder
from qwen4exp_trt.builder.reporter import Reporter
from qwen4exp_trt.builder.weight_plan import WeightPlan
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.materialize import materialize
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.specs import WeightRecipe
from qwen4exp_trt.runtime.tensor_reader import TensorReader


@dataclass(frozen=True)
class WeightSource:
    """All that a bundle's weights are made from."""

    checkpoint: Checkpoint
    converted: Checkpoint | None
    """The files of converted weights, if there are any."""
    recipes: Mapping[str, WeightRecipe]
    """What the recipes of a traced program name -> how to make it from tensors of the files."""
    reader: TensorReader

    def resolve(self, program: Program) -> Program:
        """``program`` with recipes over tensors of the files."""
        return program.map_weight_sources(self.recipes.__getitem__)

    def tensor(self, name: str) -> Tensor:
        """What a traced program calls ``name``."""
        return materialize(self.recipes[name], self.reader)


@contextmanager
def open_weight_source(
    checkpoint: Checkpoint, plan: WeightPlan, folder: ConvertedFolder, reporter: Reporter
) -> Iterator[WeightSource]:
    """Convert what is not converted yet, and open all files."""
    conversions = plan.conversions(checkpoint)
    converted = None
    if conversions:
        missing = folder.missing(conversions)
        needed, free = folder.check_space(missing)
        reporter.show_conversion(str(folder.path), len(conversions), len(conversions) - len(missing), needed, free)
        if missing:
            reporter.stage("convert")
            with TensorReader(checkpoint) as reader:
                folder.convert(missing, reader, reporter.progress)
        converted = folder.open(conversions)
    files = [checkpoint] if converted is None else [checkpoint, converted]
    with TensorReader(*files) as reader:
        yield WeightSource(checkpoint, converted, plan.sources(conversions), reader)
