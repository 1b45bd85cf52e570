"""The op ``q4e::moe``."""

from qwen4exp_trt.plugins.moe.op import SPEC

__all__ = ["SPEC"]
