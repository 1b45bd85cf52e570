"""Keeps the states of prompts that may come again: on the device, in the host's memory and on disk."""

from qwen4exp_trt.runtime.prefix_cache.cache import PrefixCache
from qwen4exp_trt.runtime.prefix_cache.opening import prefix_cache_opener
from qwen4exp_trt.runtime.prefix_cache.options import PrefixCacheOptions

__all__ = ["PrefixCache", "PrefixCacheOptions", "prefix_cache_opener"]
