"""The op ``q4e::fp8_routed_moe``."""

from qwen4exp_trt.plugins.fp8_routed_moe.op import SPEC

__all__ = ["SPEC"]
