"""The op ``q4e::hc_combine_norm``."""

from qwen4exp_trt.plugins.hc_combine_norm.op import SPEC

__all__ = ["SPEC"]
