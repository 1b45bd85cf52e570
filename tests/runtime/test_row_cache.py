"""A cache of rows against a dict."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from qwen4exp_trt.runtime.row_cache import RowCache

VALUES = torch.arange(4000.0).unsqueeze(1).repeat(1, 2)
"""Row r is ``[r, r]``."""


def take(cache: RowCache, rows: np.ndarray) -> np.ndarray:
    """What was here of rows; each must have its value."""
    out = torch.full((len(rows), 2), torch.nan)
    is_here = cache.take(rows, out)
    assert torch.equal(out[is_here], VALUES[rows[is_here]]) and out[~is_here].isnan().all()
    return is_here


def test_the_least_recently_used_rows_are_replaced() -> None:
    cache, read = RowCache(3, 2, torch.float32), list[list[int]]()

    def get(*rows: int) -> None:
        ids = np.array(rows)
        missing = ids[~take(cache, ids)]
        if len(missing):
            read.append(missing.tolist())
            cache.put(missing, VALUES[missing])

    get(1, 2, 3)
    get(1, 3)  # 2 is now the oldest
    get(4)
    get(1, 3, 4)
    get(2)
    get(5, 6, 7, 8, 9)  # more than there is room for
    get(5, 6, 7)
    get(8)
    assert read == [[1, 2, 3], [4], [2], [5, 6, 7, 8, 9], [8]]


@pytest.mark.parametrize("capacity", [0, 1, 7, 8, 100, 1000])
def test_random_uses(capacity: int) -> None:
    """A row is right or missing, however rows collide, and what was put last is there as far as there is room."""
    generator, cache = np.random.default_rng(capacity), RowCache(capacity, 2, torch.float32)
    assert capacity - 8 < cache.capacity <= capacity
    size = cache.num_bytes
    for _ in range(100):
        rows = generator.integers(0, 4000, int(generator.integers(1, 200)))  # some twice
        is_here = take(cache, rows)
        assert np.array_equal(cache.has(rows), is_here)
        missing = np.unique(rows[~is_here])
        cache.put(missing, VALUES[missing])
        if capacity == 1000 and len(missing):
            assert cache.has(missing).mean() > 0.97
    assert cache.num_bytes == size


def test_rows_that_are_used_stay(capacity: int = 800) -> None:
    """Among many that are used once."""
    generator, cache = np.random.default_rng(0), RowCache(capacity, 2, torch.float32)
    used = np.arange(100)
    cache.put(used, VALUES[used])
    for _ in range(50):
        take(cache, used)
        once = generator.choice(np.arange(100, 4000), 150, replace=False)
        missing = once[~take(cache, once)]
        cache.put(missing, VALUES[missing])
    assert cache.has(used).mean() > 0.97


def test_threads_share_it() -> None:
    cache = RowCache(200, 2, torch.float32)

    def use(seed: int) -> None:
        generator = np.random.default_rng(seed)
        for _ in range(200):
            rows = np.unique(generator.integers(0, 1000, 50))
            missing = rows[~take(cache, rows)]
            values: Tensor = VALUES[missing]
            cache.put(missing, values)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, range(4)))
