"""The exact integer constants of the n-gram hash: pure functions of the config, Python integers only."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from qwen4exp_trt.frontend.config import ModelConfig

_MASK64 = (1 << 64) - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_SEED_STRIDE = 10007
"""What separates the hash seeds of two PLE layers."""


@dataclass(frozen=True)
class NgramHash:
    """Hash constants of one PLE layer. The row of head ``h`` is ``mix % vocab_sizes[h] + offsets[h]``."""

    multipliers: tuple[int, ...]
    """[ngram_size], odd; element 0 belongs to the current token, element ``i`` to the one ``i`` before it. The
    product with any token id stays below 2**63."""
    vocab_sizes: tuple[int, ...]
    """[num_ngram_heads], distinct primes."""
    offsets: tuple[int, ...]
    """[num_ngram_heads], the first table row of each head."""
    num_rows: int
    """Rows of the table, padded to ``make_ngram_vocab_size_divisible_by``."""


def ngram_hash(config: ModelConfig, layer: int) -> NgramHash:
    """The constants of the PLE of zero-based ``layer``, which must be one of ``config.ple_layers``."""
    ple_index = config.ple_layers.index(layer)
    num_heads = config.num_ngram_heads
    primes = primes_from(config.ngram_vocab_size_base)
    sizes = tuple(itertools.islice(primes, ple_index * num_heads, (ple_index + 1) * num_heads))
    offsets = tuple(itertools.accumulate(sizes[:-1], initial=0))
    divisor = config.make_ngram_vocab_size_divisible_by
    num_rows = -(-sum(sizes) // divisor) * divisor
    return NgramHash(hash_multipliers(config, ple_index), sizes, offsets, num_rows)


def hash_multipliers(config: ModelConfig, ple_index: int) -> tuple[int, ...]:
    """One odd multiplier for each of the ``ngram_size`` tokens of the longest n-gram, newest token first."""
    half_bound = max(1, ((1 << 63) - 1) // config.vocab_size // 2)
    seed = config.seed + _SEED_STRIDE * ple_index
    draws = (splitmix64(seed + _GOLDEN_GAMMA * (i + 1)) for i in range(config.ngram_size))
    return tuple(2 * (draw % half_bound) + 1 for draw in draws)


def splitmix64(state: int) -> int:
    """The SplitMix64 output for ``state`` (taken modulo 2**64)."""
    z = (state + _GOLDEN_GAMMA) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return z ^ (z >> 31)


def primes_from(start: int) -> Iterator[int]:
    """The primes that are not below ``start``, ascending."""
    return (n for n in itertools.count(max(start, 2)) if all(n % d for d in range(2, math.isqrt(n) + 1)))
