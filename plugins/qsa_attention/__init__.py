"""The op ``q4e::qsa_attention``."""

from qwen4exp_trt.plugins.qsa_attention.op import SPEC

__all__ = ["SPEC"]
