"""The prefix cache beside drafts: only what is committed is kept, and what is kept never changes."""

from __future__ import annotations

from pathlib import Path

import pytest
from serving import assert_idle, generated, ids
from torch import Tensor

from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.prefix_cache.cache import PrefixCache

GREEDY = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
PROMPTS = ([5, 9, 14, 3, 77, 5, 9, 14, 3, 78] * 2, [5, 9, 14, 3, 77, 5, 9, 14, 3, 78, 5, 9, 14, 3, 77, 5, 41, 42])


@pytest.fixture(scope="module")
def plain(mtp_bundle: Path) -> LLM:
    return LLM(mtp_bundle, enable_prefix_caching=False)


def kept_pages(llm: LLM) -> dict[tuple[bytes, str], Tensor]:
    """The bytes of every page that the tree has, by prefix and state."""
    cache = llm.core.prefix_cache
    assert isinstance(cache, PrefixCache)
    layout = cache.tiers.layouts["page"]
    nodes = [node for node in cache.tree.root.below() if node.page is not None]
    rows = ((node.key, layout.rows(layout.read(node.page))) for node in nodes if node.page is not None)
    return {(key, name): row for key, states in rows for name, row in states.items()}


@pytest.mark.parametrize("speculate", ["mtp:3", "ngram:4"])
def test_text_is_that_without_drafts_and_cache(mtp_bundle: Path, plain: LLM, speculate: str, tmp_path: Path) -> None:
    with LLM(mtp_bundle, speculate=speculate, cache_dir=tmp_path / "cache") as llm:
        cache = llm.core.prefix_cache
        assert isinstance(cache, PrefixCache)
        histories = [list(prompt) for prompt in PROMPTS]
        for turn in range(2):
            before = kept_pages(llm)
            for history in histories:
                (expected,), (output,) = plain.generate([ids(history)], GREEDY), llm.generate([ids(history)], GREEDY)
                assert generated(output) == generated(expected)
                assert turn == 0 or output.metrics.num_cached_tokens == (len(history) - 3) // 8 * 8
                history += [*generated(output), 50 + turn, 51]
            after = kept_pages(llm)
            assert all((after[name].float() == page.float()).all() for name, page in before.items())
        assert_idle(llm)
    with LLM(mtp_bundle, speculate=speculate, cache_dir=tmp_path / "cache") as again:
        history = histories[0]
        (expected,), (output,) = plain.generate([ids(history)], GREEDY), again.generate([ids(history)], GREEDY)
        assert generated(output) == generated(expected)
        assert output.metrics.num_cached_tokens > 0
