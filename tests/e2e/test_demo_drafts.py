"""Drafts on the demo checkpoint, with every proposer: the text is the one without them, and prefixes are shared."""

from __future__ import annotations

from pathlib import Path

import bundles
import pytest
from serving import assert_idle, generated, ids

from qwen4exp_trt.runtime import LLM, SamplingParams

pytestmark = pytest.mark.slow

GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("demo") / "bundle"
    limits = {"max_batch_size": 3, "max_seq_len": 256, "prefill_chunk": 64, "block_size": 16}
    return bundles.build(bundles.DEMO_CHECKPOINT, output, **limits)


@pytest.fixture(scope="module")
def plain(bundle: Path) -> LLM:
    return LLM(bundle, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def prompts(plain: LLM) -> list[list[int]]:
    """Of held-out text, up to longer than the indexer's budget; some begin alike, and one repeats itself."""
    assert plain.tokenizer is not None
    text = bundles.HELDOUT_TEXT.read_text(encoding="utf-8")
    tokens = plain.tokenizer.encode(text, add_special_tokens=False)
    return [tokens[:5], tokens[40:160], [*tokens[40:105], *tokens[500:510]], tokens[300:316] * 4]


@pytest.fixture(scope="module")
def expected(plain: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [generated(output) for output in plain.generate([ids(prompt) for prompt in prompts], GREEDY)]


@pytest.mark.parametrize("speculate", ["ngram:4", "mtp:3"])
def test_greedy_text_is_the_undrafted_one(
    bundle: Path, prompts: list[list[int]], expected: list[list[int]], speculate: str
) -> None:
    """More prompts than run at a time; later some find their prefixes in the cache."""
    llm = LLM(bundle, speculate=speculate)
    for chosen in (range(4), (1, 2)):
        outputs = llm.generate([ids(prompts[index]) for index in chosen], GREEDY)
        assert [generated(output) for output in outputs] == [expected[index] for index in chosen]
        assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0
    assert sum(output.metrics.num_cached_tokens for output in outputs) > 100
    assert_idle(llm)
