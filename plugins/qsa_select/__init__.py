"""The op ``q4e::qsa_select``."""

from qwen4exp_trt.plugins.qsa_select.op import SPEC

__all__ = ["SPEC"]
