"""The op ``q4e::fp8_linear``."""

from qwen4exp_trt.plugins.fp8_linear.op import SPEC

__all__ = ["SPEC"]
