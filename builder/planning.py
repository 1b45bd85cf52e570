"""Makes the plan of a bundle from the options of its build."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from qwen4exp_trt.builder.activations import estimate_activations, estimate_workspace
from qwen4exp_trt.builder.compile import transform_config
from qwen4exp_trt.builder.draft_head import DraftChoice, choose_draft_head
from qwen4exp_trt.builder.options import DEFAULT_TARGET, PlanOptions
from qwen4exp_trt.builder.plan import ActivationMemory, Plan, PlanRequest, make_plan
from qwen4exp_trt.builder.plugin_inputs import check_patterns, plugin_inputs
from qwen4exp_trt.builder.weight_plan import WeightPlan, plan_weights
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.stored_weights import StoredWeight
from qwen4exp_trt.frontend.weights import resolve_weights
from qwen4exp_trt.passes.choose_formats import Formats
from qwen4exp_trt.passes.pipeline import Quantization
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.specs import PleResidency, TensorSpec

StoredWeights = Mapping[str, StoredWeight] | None
"""By canonical name; None for a checkpoint that is not there, and is taken to have every weight in float."""


def read_stored_weights(options: PlanOptions, config: ModelConfig) -> tuple[DraftChoice, StoredWeights]:
    """The draft head that a bundle gets, and what the headers of the checkpoint say, if there are any files."""
    if options.config_only or not any(options.checkpoint.glob("*.safetensors")):
        return choose_draft_head(options, config, None), None
    checkpoint = Checkpoint.open(options.checkpoint)
    draft = choose_draft_head(options, config, checkpoint)
    return draft, resolve_weights(draft.config, checkpoint, draft.token_ids).weights


def weight_plan_for(options: PlanOptions, config: ModelConfig, stored: StoredWeights) -> WeightPlan:
    return plan_weights(config, stored, options.precision, options.ple_precision, options.keep)


def _debug_outputs(options: PlanOptions, weight_plan: WeightPlan) -> tuple[TensorSpec, ...]:
    """The plugin inputs that the options mark, of the whole model and its draft head: they are traced for it.

    `BuildError` for a pattern that matches none.
    """
    if not options.mark_plugin_inputs:
        return ()
    quantization = Quantization(weight_plan.formats, weight_plan.table_scales)
    parts = (False, True) if weight_plan.config.has_draft_head else (False,)
    exports = [replace(options.export, is_draft=is_draft) for is_draft in parts]
    programs = [transform_config(weight_plan.config, export, quantization)[0] for export in exports]
    check_patterns(programs, options.mark_plugin_inputs)
    return tuple(spec for program in programs for spec in plugin_inputs(program, options.mark_plugin_inputs))


def plan_bundle(options: PlanOptions, weight_plan: WeightPlan) -> Plan:
    """What the bundle will need on its target."""
    target = options.engine_target if options.has_engine else None
    if target is not None and not re.fullmatch(r"sm\d{2,3}", target):
        raise BuildError(f"--target is {target!r}; it must be a GPU architecture such as {DEFAULT_TARGET}")
    config, stored = weight_plan.config, weight_plan.weights
    limits = options.limits_for(config)

    def choose_formats(precision: str, ple: str) -> Formats:
        if (precision, ple) == (options.precision, options.ple_precision):
            return weight_plan.formats
        return plan_weights(config, stored, precision, ple, options.keep).formats

    step = config, options.activation_dtype, limits
    activations = ActivationMemory(
        estimate_activations(*step), is_estimate=True, workspace_bytes=estimate_workspace(*step)
    )
    request = PlanRequest(
        config=config,
        limits=limits,
        target=target,
        precision=options.precision,
        ple=options.ple_precision,
        has_stored_formats=stored is not None,
        choose_formats=choose_formats,
        activations=activations,
        activation_dtype=options.activation_dtype,
        kv_cache_dtype=options.export.kv_cache_dtype,
        ple_residency=PleResidency(options.ple_residency),
        debug_outputs=_debug_outputs(options, weight_plan),
    )
    return make_plan(request)
