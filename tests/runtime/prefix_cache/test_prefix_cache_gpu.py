"""Prefixes on a GPU: snapshots there, in pinned memory and on disk, beside captured steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import bundles
import pytest
from serving import assert_idle, generated, ids

from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.prefix_cache.cache import PrefixCache

pytestmark = pytest.mark.gpu

LIMITS = {"max_batch_size": 4, "max_seq_len": 256, "prefill_chunk": 64, "block_size": 16}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.build_for_gpu(tmp_path_factory.mktemp("gpu") / "bundle", "float32", **LIMITS)


def answer(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [generated(output) for output in llm.generate([ids(prompt) for prompt in prompts], GREEDY)]


@pytest.mark.parametrize("speculate", [None, "mtp:3"])
def test_text_is_that_without_a_cache(bundle: Path, tmp_path: Path, speculate: str | None) -> None:
    plain = LLM(bundle, device="cuda", enable_prefix_caching=False)
    assert plain.tokenizer is not None
    text = plain.tokenizer.encode(bundles.HELDOUT_TEXT.read_text(encoding="utf-8"), add_special_tokens=False)
    prompts = [text[:150], text[:100] + text[200:230], text[300:420], text[:100] + text[420:430]]
    expected, folder = answer(plain, prompts), tmp_path / "cache"
    options: dict[str, Any] = {"device": "cuda", "speculate": speculate}
    with LLM(bundle, cache_dir=folder, host_cache_bytes=2**28, **options) as llm:
        cache = llm.core.prefix_cache
        assert isinstance(cache, PrefixCache)
        assert answer(llm, prompts) == expected
        assert answer(llm, prompts) == expected
        assert cache.counters.hit_tokens["device"] > 0
        cache.evict(llm.core.scheduler.num_blocks)
        assert answer(llm, prompts) == expected
        assert cache.counters.hit_tokens["host"] > 0
        assert_idle(llm)
    with LLM(bundle, cache_dir=folder, **options) as again:
        cache = again.core.prefix_cache
        assert isinstance(cache, PrefixCache)
        assert answer(again, prompts) == expected
        assert cache.counters.hit_tokens["disk"] > 0
        assert_idle(again)
