"""The op ``q4e::ple_hash``."""

from qwen4exp_trt.plugins.ple_hash.op import SPEC

__all__ = ["SPEC"]
