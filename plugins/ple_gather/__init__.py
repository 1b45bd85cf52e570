"""The op ``q4e::ple_gather``."""

from qwen4exp_trt.plugins.ple_gather.op import SPEC

__all__ = ["SPEC"]
