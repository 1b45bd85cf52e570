"""Generates text from bundles. Imports neither the frontend, the passes nor the builder."""

if __name__ != "qwen4exp_trt.runtime":
    raise ImportError("import qwen4exp_trt.runtime: under another name it would be a second copy")

from qwen4exp_trt.runtime.async_llm import AsyncLLM
from qwen4exp_trt.runtime.llm import LLM
from qwen4exp_trt.runtime.metrics import RequestMetrics
from qwen4exp_trt.runtime.outputs import CompletionOutput, RequestOutput, StreamChunk
from qwen4exp_trt.runtime.sampling_params import SamplingParams

__all__ = ["LLM", "AsyncLLM", "CompletionOutput", "RequestMetrics", "RequestOutput", "SamplingParams", "StreamChunk"]
