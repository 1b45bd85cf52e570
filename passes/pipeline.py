"""The order of the passes."""

from __future__ import annotations

from qwen4exp_trt.passes.base import Pass
from qwen4exp_trt.passes.drop_dead_code import drop_dead_code
from qwen4exp_trt.passes.fold_weights import fold_weights
from qwen4exp_trt.passes.fuse_hc_combine import fuse_hc_combine
from qwen4exp_trt.passes.merge_hc_projections import merge_hc_projections
from qwen4exp_trt.passes.merge_projections import merge_projections

PIPELINE: tuple[Pass, ...] = (
    fuse_hc_combine,
    # The merges leave concatenations of weights behind, which folding turns into recipes.
    merge_hc_projections,
    merge_projections,
    fold_weights,
    drop_dead_code,
)
