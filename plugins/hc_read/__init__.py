"""The op ``q4e::hc_read``."""

from qwen4exp_trt.plugins.hc_read.op import SPEC

__all__ = ["SPEC"]
