"""The op ``q4e::sample_tokens``."""

from qwen4exp_trt.plugins.sample_tokens.op import SPEC

__all__ = ["SPEC"]
