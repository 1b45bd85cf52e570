"""The op ``q4e::hc_project``."""

from qwen4exp_trt.plugins.hc_project.op import SPEC

__all__ = ["SPEC"]
