"""The op ``q4e::fp8_ple_gather``."""

from qwen4exp_trt.plugins.fp8_ple_gather.op import SPEC

__all__ = ["SPEC"]
