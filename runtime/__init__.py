"""Generates text from bundles. Imports neither the frontend, the passes nor the builder."""

from qwen4exp_trt.runtime.llm import LLM
from qwen4exp_trt.runtime.outputs import CompletionOutput, RequestOutput
from qwen4exp_trt.runtime.sampling_params import SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]
