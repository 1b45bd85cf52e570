"""Drafts on a GPU, with the demo checkpoint."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import bundles
import pytest
import torch
from draft_proposers import drafting_of, right_up_to
from draft_requests import drafts_of, requests_of
from serving import assert_idle, generated, ids

from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.sampler import sample

pytestmark = pytest.mark.gpu

LIMITS = {"max_batch_size": 6, "max_seq_len": 256, "prefill_chunk": 64, "block_size": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.build_for_gpu(tmp_path_factory.mktemp("float32") / "bundle", "float32", **LIMITS)


@pytest.fixture(scope="module")
def plain(bundle: Path) -> LLM:
    return LLM(bundle, device="cuda")


@pytest.fixture(scope="module")
def prompts(plain: LLM) -> list[list[int]]:
    """Of held-out text, up to longer than the indexer's budget and than a chunk; the last repeats itself."""
    assert plain.tokenizer is not None
    text = bundles.HELDOUT_TEXT.read_text(encoding="utf-8")
    tokens = plain.tokenizer.encode(text, add_special_tokens=False)
    return [tokens[:5], tokens[40:150], tokens[200:230], tokens[300:316] * 4]


@pytest.fixture(scope="module")
def expected(plain: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [generated(output) for output in plain.generate([ids(prompt) for prompt in prompts], GREEDY)]


@pytest.mark.parametrize("speculate", ["ngram:4", "mtp:3", "mtp:7"])
def test_greedy_text_is_the_undrafted_one(
    bundle: Path, prompts: list[list[int]], expected: list[list[int]], speculate: str
) -> None:
    llm = LLM(bundle, device="cuda", speculate=speculate)
    outputs = llm.generate([ids(prompt) for prompt in prompts], GREEDY)
    assert [generated(output) for output in outputs] == expected
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 0
    assert_idle(llm)


def test_every_accepted_count_goes_on_as_undrafted(
    plain: LLM, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    texts = {tuple(prompt): text for prompt, text in zip(prompts, expected, strict=True)}
    counts = itertools.cycle([7, 0, 3, 1, 5, 2, 4, 6])
    plain.core.drafting = drafting_of(right_up_to(texts, lambda: next(counts), plain.manifest.vocab_size))
    try:
        outputs = plain.generate([ids(prompt) for prompt in prompts], GREEDY)
    finally:
        plain.core.drafting = None
    assert [generated(output) for output in outputs] == expected


@contextmanager
def counted_waits() -> Iterator[list[warnings.WarningMessage]]:
    """Where the host waits for the GPU."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as waits:
            warnings.simplefilter("always")
            yield waits
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(("speculate", "num_waits"), [("ngram:4", 1), ("mtp:3", 2)])
def test_a_step_waits_for_its_tokens_and_for_the_drafts(
    bundle: Path, prompts: list[list[int]], speculate: str, num_waits: int
) -> None:
    llm = LLM(bundle, device="cuda", speculate=speculate)
    llm.generate([ids(prompt) for prompt in prompts], GREEDY)  # shapes are captured
    sequences = [llm.core.make_sequence(None, prompt, GREEDY) for prompt in prompts]
    for sequence in sequences:
        llm.core.add(sequence)
    while any(sequence.num_output_tokens < 4 for sequence in sequences):
        llm.core.step()
    for _ in range(4):
        with counted_waits() as waits:
            llm.core.step()
        places = [f"{each.filename}:{each.lineno}" for each in waits if "synchronizing" in str(each.message)]
        assert len(places) == num_waits, places
    for sequence in sequences:
        llm.core.abort(sequence)


def test_sampled_text_is_reproducible(bundle: Path, prompts: list[list[int]]) -> None:
    llm = LLM(bundle, device="cuda", speculate="mtp:3")
    params = SamplingParams(temperature=0.8, top_p=0.95, top_k=50, seed=3, max_tokens=60, ignore_eos=True)
    first, second = (llm.generate(ids(prompts[1]), params)[0] for _ in range(2))
    assert generated(first) == generated(second)
    assert 0 < first.metrics.num_accepted_tokens < first.metrics.num_draft_tokens


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.8, top_k=20, top_p=0.9), SamplingParams()])
def test_verified_tokens_are_the_cpus(params: SamplingParams) -> None:
    """The same noise decides in both places."""
    count, vocab = 500, 5000
    target, draft = torch.randn(2, vocab) * 2
    requests = requests_of(params, count)
    drafts = drafts_of(draft, requests)
    drafted = [replace(request, drafted=drafts[row]) for row, request in enumerate(requests)]
    rows = target.expand(count, -1)
    on_cpu, on_gpu = (sample(logits, drafted, None) for logits in (rows, rows.contiguous().cuda()))
    same = sum(
        a is not None and b is not None and a.token_id == b.token_id for a, b in zip(on_cpu, on_gpu, strict=True)
    )
    assert same >= 0.99 * count
