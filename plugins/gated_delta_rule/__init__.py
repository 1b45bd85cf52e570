"""The op ``q4e::gated_delta_rule``."""

from qwen4exp_trt.plugins.gated_delta_rule.op import SPEC

__all__ = ["SPEC"]
