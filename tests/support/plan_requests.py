"""Plans of the released model."""

from __future__ import annotations

from released_model import released_config

from qwen4exp_trt.builder.plan import ActivationMemory, Plan, PlanRequest, make_plan
from qwen4exp_trt.passes.choose_formats import Formats
from qwen4exp_trt.runtime.limits import EngineLimits


def plan_request(
    formats: Formats, batch: int = 1, max_seq_len: int = 2051, kv_cache_dtype: str = "auto"
) -> PlanRequest:
    """Of a policy that always chooses ``formats``, without activations."""
    return PlanRequest(
        config=released_config(),
        limits=EngineLimits(batch, max_seq_len, min(max_seq_len, 2048), 64),
        target="sm121",
        precision="checkpoint",
        ple="checkpoint",
        has_stored_formats=True,
        choose_formats=lambda precision, ple: formats,
        activations=ActivationMemory(0, is_estimate=True),
        kv_cache_dtype=kv_cache_dtype,
    )


def released_plan(formats: Formats, batch: int = 1, max_seq_len: int = 2051, kv_cache_dtype: str = "auto") -> Plan:
    return make_plan(plan_request(formats, batch, max_seq_len, kv_cache_dtype))
