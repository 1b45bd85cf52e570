"""The op ``q4e::hc_mix``."""

from qwen4exp_trt.plugins.hc_mix.op import SPEC

__all__ = ["SPEC"]
