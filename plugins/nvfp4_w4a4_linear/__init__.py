"""The op ``q4e::nvfp4_w4a4_linear``."""

from qwen4exp_trt.plugins.nvfp4_w4a4_linear.op import SPEC

__all__ = ["SPEC"]
