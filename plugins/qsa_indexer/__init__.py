"""The op ``q4e::qsa_indexer``."""

from qwen4exp_trt.plugins.qsa_indexer.op import SPEC

__all__ = ["SPEC"]
