"""The op ``q4e::hc_gate_mix``."""

from qwen4exp_trt.plugins.hc_gate_mix.op import SPEC

__all__ = ["SPEC"]
