"""What becomes of the weights of a checkpoint: their formats, the files to convert, and where each part comes from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qwen4exp_trt.builder.convert import Conversion, converted_parts, num_table_scales, plan_conversions
from qwen4exp_trt.builder.policy import Choice, choose_weight_formats, is_table
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.stored_weights import StoredWeight
from qwen4exp_trt.frontend.weights import expected_weights
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.specs import WeightRecipe
from qwen4exp_trt.runtime.weight_formats import Part, WeightFormat, part_name
from qwen4exp_trt.runtime.weights import dequantize


@dataclass(frozen=True)
class WeightPlan:
    """The choice of every weight of a config, and of a checkpoint how it provides them."""

    config: ModelConfig
    choices: tuple[Choice, ...]
    weights: Mapping[str, StoredWeight] | None
    """None without a checkpoint."""

    @property
    def formats(self) -> dict[str, WeightFormat]:
        """By canonical name; FLOAT ones are left out."""
        return {choice.name: choice.format for choice in self.choices if choice.format is not WeightFormat.FLOAT}

    @property
    def table_scales(self) -> dict[str, int]:
        """How many scales each n-gram table will have."""
        shapes = expected_weights(self.config)
        return {
            choice.name: num_table_scales(shapes[choice.name][0])
            if choice.is_converted or self.weights is None
            else self.weights[choice.name].num_scales
            for choice in self.choices
            if is_table(choice.name)
        }

    def conversions(self, checkpoint: Checkpoint) -> list[Conversion]:
        """The files that the plan needs beside the checkpoint."""
        assert self.weights is not None
        converted = [choice.name for choice in self.choices if choice.is_converted]
        tables = [name for name in converted if is_table(name)]
        return plan_conversions(self.weights, converted, tables, checkpoint)

    def sources(self, conversions: Sequence[Conversion]) -> dict[str, WeightRecipe]:
        """What a program's recipes name -> a recipe over tensors of the checkpoint and of the converted files.

        Of a quantized weight: its parts, and under its own name the float weight that they mean.
        """
        assert self.weights is not None
        by_weight: dict[str, list[Conversion]] = defaultdict(list)
        for conversion in conversions:
            by_weight[conversion.weight].append(conversion)
        sources: dict[str, WeightRecipe] = {}
        for choice in self.choices:
            stored = self.weights[choice.name]
            sources[choice.name] = stored.value
            parts: Mapping[Part, WeightRecipe] = {}
            if choice.is_converted:
                parts = converted_parts(by_weight[choice.name])
                sources[choice.name] = dequantize(choice.format, parts)
            elif choice.format is not WeightFormat.FLOAT:
                parts = stored.parts
            sources |= {part_name(choice.name, part): recipe for part, recipe in parts.items()}
        return sources


def plan_weights(
    config: ModelConfig,
    weights: Mapping[str, StoredWeight] | None,
    precision: str,
    ple_precision: str,
    keep: Sequence[str],
) -> WeightPlan:
    """The plan for a checkpoint's ``weights``; None stands for a checkpoint that has every weight in float."""
    stored = {
        name: (WeightFormat.FLOAT,) if weights is None else weights[name].stored_formats
        for name in expected_weights(config)
    }
    return WeightPlan(config, choose_weight_formats(config, stored, precision, ple_precision, keep), weights)
