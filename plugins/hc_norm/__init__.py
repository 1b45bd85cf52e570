"""The op ``q4e::hc_norm``."""

from qwen4exp_trt.plugins.hc_norm.op import SPEC

__all__ = ["SPEC"]
