"""The op ``q4e::nvfp4_routed_moe``."""

from qwen4exp_trt.plugins.nvfp4_routed_moe.op import SPEC

__all__ = ["SPEC"]
