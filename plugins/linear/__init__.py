"""The op ``q4e::linear``."""

from qwen4exp_trt.plugins.linear.op import SPEC

__all__ = ["SPEC"]
