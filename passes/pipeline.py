"""The order of the passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from qwen4exp_trt.passes.base import Pass
from qwen4exp_trt.passes.choose_formats import Formats, choose_formats
from qwen4exp_trt.passes.drop_dead_code import drop_dead_code
from qwen4exp_trt.passes.fold_weights import fold_weights
from qwen4exp_trt.passes.fuse_hc_combine import fuse_hc_combine
from qwen4exp_trt.passes.fuse_hc_mix import fuse_hc_mix
from qwen4exp_trt.passes.fuse_hc_reads import fuse_hc_reads
from qwen4exp_trt.passes.look_up_ngram_rows import look_up_ngram_rows
from qwen4exp_trt.passes.merge_hc_projections import merge_hc_projections
from qwen4exp_trt.passes.merge_projections import merge_projections
from qwen4exp_trt.passes.quantize_activations import quantize_activations
from qwen4exp_trt.runtime.specs import PleResidency
from qwen4exp_trt.runtime.weight_formats import WeightFormat


@dataclass(frozen=True)
class Quantization:
    """How a build quantizes weights; by default not at all."""

    formats: Formats = field(default_factory=dict[str, WeightFormat])
    table_scales: Mapping[str, int] = field(default_factory=dict[str, int])
    """Canonical name of an n-gram table -> how many scales it has; 1 where it is absent."""
    input_scales: Mapping[str, float] = field(default_factory=dict[str, float])
    """Path of a projection whose activations become NVFP4 -> the scale of its input."""


def make_pipeline(quantization: Quantization, ple_residency: str = PleResidency.DEVICE) -> tuple[Pass, ...]:
    """The passes in their order."""
    is_table_read = ple_residency == PleResidency.DISK
    return (
        fuse_hc_combine,
        # The merges leave concatenations of weights behind, which folding turns into recipes.
        merge_hc_projections,
        # Projections merge in the formats that were chosen for them.
        choose_formats(quantization.formats, quantization.table_scales),
        merge_projections,
        # What is merged shares an input, and so the scale of it.
        quantize_activations(quantization.input_scales),
        # An up projection in another format than float has its own op and stays apart.
        fuse_hc_mix,
        fuse_hc_reads,
        fold_weights,
        *([look_up_ngram_rows] if is_table_read else []),
        drop_dead_code,
    )
