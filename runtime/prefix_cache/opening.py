"""Opens the prefix cache of a bundle."""

from __future__ import annotations

from collections.abc import Callable

import torch

from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.prefix_cache.cache import PrefixCache
from qwen4exp_trt.runtime.prefix_cache.identity import cache_identity
from qwen4exp_trt.runtime.prefix_cache.options import PrefixCacheOptions
from qwen4exp_trt.runtime.sequence_states import SequenceStates


def prefix_cache_opener(
    manifest: Manifest, backend: str, device: torch.device, options: PrefixCacheOptions
) -> Callable[[SequenceStates], PrefixCache]:
    """What makes the cache of the states that ``backend`` has on ``device``; `CacheError` if its folder is unusable."""

    def open_cache(states: SequenceStates) -> PrefixCache:
        block_size = manifest.limits.block_size
        described = [block_size, [[spec.name, spec.dtype, spec.shape, spec.init] for spec in states.pool.specs]]
        identity = cache_identity(manifest, backend, device.type, described)
        return PrefixCache(states, block_size, identity, options)

    return open_cache
