"""The op ``q4e::causal_conv1d``."""

from qwen4exp_trt.plugins.causal_conv1d.op import SPEC

__all__ = ["SPEC"]
