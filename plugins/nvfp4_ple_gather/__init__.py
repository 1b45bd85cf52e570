"""The op ``q4e::nvfp4_ple_gather``."""

from qwen4exp_trt.plugins.nvfp4_ple_gather.op import SPEC

__all__ = ["SPEC"]
