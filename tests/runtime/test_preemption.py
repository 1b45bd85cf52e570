"""Requests that lose their memory to others write the text that they would have written."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from serving import assert_idle, generated, ids

from qwen4exp_trt.runtime import LLM, SamplingParams

PROMPTS = [[(7 * row + 3 * place) % 90 + 5 for place in range(2 + 6 * row)] for row in range(4)]
NUM_BLOCKS = 8
"""Of the longest sequence: three such sequences never fit."""
GREEDY = SamplingParams(temperature=0, max_tokens=34, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.95, max_tokens=34, ignore_eos=True, seed=3, repetition_penalty=1.2)


OPTIONS = [{}, {"speculate": "ngram:3"}, pytest.param({"enable_prefix_caching": False}, marks=pytest.mark.slow)]


@pytest.fixture(scope="module", params=OPTIONS, ids=str)
def crowded(tiny_bundle: Path, request: pytest.FixtureRequest) -> LLM:
    """The tiny model with few pages."""
    return LLM(tiny_bundle, num_blocks=NUM_BLOCKS, **request.param)


@pytest.fixture(scope="module")
def expected(tiny_llm: LLM) -> list[list[int]]:
    """The greedy text of each prompt alone."""
    return [generated(tiny_llm.generate(ids(prompt), GREEDY)[0]) for prompt in PROMPTS]


def texts(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [generated(output) for output in llm.generate([ids(prompt) for prompt in PROMPTS], params)]


def test_greedy_text_is_that_of_requests_alone(expected: list[list[int]], crowded: LLM) -> None:
    before = crowded.core.metrics.preemptions.total()
    assert texts(crowded, GREEDY) == expected
    assert crowded.core.metrics.preemptions.total() > before, "somebody lost memory"


@pytest.mark.slow
def test_sampled_text_is_that_of_requests_alone(tiny_llm: LLM, crowded: LLM) -> None:
    assert texts(crowded, SAMPLED) == [generated(tiny_llm.generate(ids(prompt), SAMPLED)[0]) for prompt in PROMPTS]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_cancelled_at_any_time_they_leave_nothing_behind(expected: list[list[int]], crowded: LLM, seed: int) -> None:
    """Before, while and after they run, also when they wait for their memory again."""
    core, rng = crowded.core, random.Random(seed)
    sequences = [core.make_sequence(None, prompt, GREEDY) for prompt in PROMPTS]
    times = {rng.randrange(45): victim for victim in rng.sample(range(len(PROMPTS)), 2)}
    for sequence in sequences:
        core.add(sequence)
    for now in itertools.count():
        if now in times:
            core.abort(sequences[times[now]])
        if not core.scheduler.num_unfinished:
            break
        core.step()
    for index, sequence in enumerate(sequences):
        text = sequence.token_ids[len(PROMPTS[index]) :]
        assert text == expected[index][: len(text)]
        assert len(text) == len(expected[index]) or index in times.values()
    core.prefix_cache.evict(NUM_BLOCKS)
    assert_idle(crowded)
