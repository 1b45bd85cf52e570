"""Prompts through the indexer, the selection and the attention on a GPU, at released sizes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from op_checks import rms_error
from qsa_prompts import Prompts

from qwen4exp_trt.plugins.registry import all_specs

pytestmark = pytest.mark.gpu
TOLERANCE = all_specs()["qsa_attention"].tolerance[torch.bfloat16]
FP8 = torch.float8_e4m3fn
LONGEST = 262_144


def some_rows(length: int) -> list[int]:
    """Rows around the budget, around borders of tiles, the first and the last ones."""
    rows = {0, 1, 2, 3, 9, 10, 127, 640, *range(2044, 2056), *range(length - 6, length), *range(0, length, 509)}
    return sorted(row for row in rows if 0 <= row < length)


@pytest.mark.parametrize("length", [2048, 2051, 2052, 4096, 8191])
@pytest.mark.parametrize("noise", [0.1, 3.0])
def test_prompt(length: int, noise: float) -> None:
    for cache_dtype in (torch.bfloat16, FP8):
        prompts = Prompts([length], noise=noise, cache_dtype=cache_dtype)
        prompts.run([length])
        prompts.check(0, some_rows(length), TOLERANCE)


@pytest.mark.parametrize("cuts", [(2049, 2050, 3001), (2051, 4096), (700, 2052, 2563)])
def test_chunks_equal_one_shot(cuts: tuple[int, ...]) -> None:
    """Chunks that end inside of a group, and on the budget."""
    prompts = Prompts([5001])
    prompts.run([5001])
    once = prompts.out[0]
    prompts.run(*[[end - start] for start, end in pairwise([0, *cuts, 5001])])
    prompts.check(0, some_rows(5001), TOLERANCE)
    assert rms_error(once, prompts.out[0]) <= TOLERANCE


@pytest.mark.parametrize("noise", [0.1, 3.0])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
def test_last_chunk_of_the_longest_prompt(noise: float, cache_dtype: torch.dtype) -> None:
    prompts = Prompts([8192], [LONGEST - 8192], noise, cache_dtype)
    prompts.run([8192])
    prompts.check(0, some_rows(8192), TOLERANCE)


def test_prompts_beside_decoding() -> None:
    """Steps of a long chunk, a short one, drafts and single rows."""
    lengths, contexts = [1, 2000, 8, 701, 1, 3], [40_000, 3000, 100_000, 60, 8, 0]
    prompts = Prompts(lengths, contexts, noise=0.2)
    prompts.run(lengths)
    for b, length in enumerate(lengths):
        prompts.check(b, some_rows(length), TOLERANCE)
