"""The op ``q4e::nvfp4_moe``."""

from qwen4exp_trt.plugins.nvfp4_moe.op import SPEC

__all__ = ["SPEC"]
