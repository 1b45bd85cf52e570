"""The op ``q4e::ple_conv``."""

from qwen4exp_trt.plugins.ple_conv.op import SPEC

__all__ = ["SPEC"]
