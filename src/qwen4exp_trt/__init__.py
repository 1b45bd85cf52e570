"""Lowering of Qwen3.8-Flash-Next (``model_type: qwen4_exp``) to TensorRT engines, and the runtime that uses them."""

from importlib.metadata import version

__version__ = version("qwen4exp-trt")
