"""One sequence, however it is cut: prompts of every length, decode after prefill, chunked prefill."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from hf_parity import (
    EOS,
    REFERENCE_BOUND,
    SELF_BOUND,
    SMALL,
    Pair,
    PairFactory,
    assert_logits_equal,
    generate_greedy,
    random_prompt,
    reference_decode,
    reference_logits,
    relative_error,
    score_in_pieces,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from model_zoo import tiny_config_dict

from qwen4exp_trt.runtime import SamplingParams

BUDGET, RATIO = 16, 4
INERT = BUDGET + RATIO - 1
"""The longest sequence whose indexer selects everything."""

IM_END = 5
"""An end-of-turn token: generation stops at it, n-grams go on."""

PROMPT = random_prompt(61, seed=1, eos=(0, 7, 9, 10, 30))


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, INERT - 1, INERT, INERT + 1, INERT + 4, 2 * INERT, 8 * RATIO, 128])
def test_prompt_of_length_equals_transformers(tiny: Pair, length: int) -> None:
    tiny.check(random_prompt(length, seed=length))


@pytest.mark.parametrize("ngram_size", [2, 4])
def test_prompt_shorter_than_the_ngram_equals_transformers(make: PairFactory, ngram_size: int) -> None:
    pair = make(tiny_config_dict(**SMALL, ngram_size=ngram_size, ple_embed_dim=96))
    for length in (1, 2, 3, 4):
        pair.check(random_prompt(length, seed=length))


@pytest.mark.parametrize(
    "eos",
    [(0,), (1,), (0, 1), (29,), (10, 11, 12), (3, 5, 7, 9), tuple(range(30))],
    ids=lambda places: f"{len(places)}",
)
def test_eos_inside_the_prompt_equals_transformers(tiny: Pair, eos: tuple[int, ...]) -> None:
    tiny.check(random_prompt(30, seed=2, eos=eos))


def test_end_of_turn_inside_the_prompt_equals_transformers(make: PairFactory) -> None:
    pair = make(tiny_config_dict(eos_token_id=[EOS, IM_END]))
    prompt = random_prompt(30, seed=2, eos=(4, 20))
    prompt[5] = prompt[12] = prompt[13] = prompt[29] = IM_END
    pair.check(prompt)


@pytest.mark.parametrize("prompt_len", [1, INERT - 1, 40])
def test_decode_equals_transformers_cached_and_from_scratch(tiny: Pair, prompt_len: int) -> None:
    """64 steps, across pages, groups, the budget and the n-gram's reset; log-probabilities at each."""
    prompt = random_prompt(prompt_len, seed=3)
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True, logprobs=96)
    output = tiny.llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0]
    assert output.logprobs is not None
    logprobs = torch.tensor([[entries[token].logprob for token in range(96)] for entries in output.logprobs])
    tokens = prompt + output.token_ids
    for expected in (
        reference_decode(tiny.reference, tokens, prompt_len)[:-1],
        reference_logits(tiny.reference, tokens)[prompt_len - 1 : -1],
    ):
        assert_logits_equal(expected.log_softmax(-1), logprobs, REFERENCE_BOUND)


def test_decode_of_a_given_text_equals_prefill(tiny: Pair) -> None:
    """Every token as a step of its own, with eos inside, against one step."""
    expected = tiny.check(PROMPT)
    decoded = score_in_pieces(tiny.core(), PROMPT, [1] * len(PROMPT))
    assert_logits_equal(expected, decoded, REFERENCE_BOUND)
    assert_logits_equal(tiny.llm.score(PROMPT), decoded, SELF_BOUND)


@pytest.mark.parametrize("chunk", range(1, 10))
def test_chunked_prefill_equals_one_shot(tiny: Pair, chunk: int) -> None:
    core, one_shot = tiny.core(prefill_chunk=chunk), tiny.core()
    assert_logits_equal(one_shot.score(PROMPT), core.score(PROMPT), SELF_BOUND)
    (tokens, logprobs), (expected_tokens, expected) = (generate_greedy(c, [PROMPT], 8)[0] for c in (core, one_shot))
    assert tokens == expected_tokens
    assert relative_error(expected, logprobs) <= SELF_BOUND


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5, 8, 9, 10, INERT, INERT + 1, 24, 48])
def test_two_chunks_equal_one_shot(tiny: Pair, cut: int) -> None:
    """Among others, fewer than the 9 tokens that the PLE convolution looks back on either side of the cut."""
    for length in (cut + 1, cut + 4, cut + 9, 60):
        prompt = PROMPT[:length]
        pieces = score_in_pieces(tiny.core(), prompt, [cut, length - cut])
        assert_logits_equal(tiny.llm.score(prompt), pieces, SELF_BOUND)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_every_cut_of_a_prompt_equals_one_shot(tiny: Pair, seed: int) -> None:
    prompt = random_prompt(50, seed=seed, eos=(seed, 11, 12, 25 + seed))
    expected = tiny.check(prompt)
    for cut in range(1, len(prompt)):
        assert_logits_equal(expected, score_in_pieces(tiny.core(), prompt, [cut, len(prompt) - cut]), REFERENCE_BOUND)


@st.composite
def cut_prompts(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    """A prompt and the sizes of its pieces."""
    length = draw(st.integers(1, 70))
    prompt = random_prompt(length, draw(st.integers(0, 2**31)), draw(st.lists(st.integers(0, length - 1), max_size=6)))
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=12))) if length > 1 else []
    ends = [*cuts, length]
    return prompt, [end - start for start, end in zip([0, *cuts], ends, strict=True)]


def check_cut_prompt(pair: Pair, prompt: list[int], sizes: list[int]) -> None:
    assert list(accumulate(sizes))[-1] == len(prompt)
    expected = pair.check(prompt)
    pieces = score_in_pieces(pair.core(), prompt, sizes)
    assert_logits_equal(expected, pieces, REFERENCE_BOUND)
    assert_logits_equal(pair.llm.score(prompt), pieces, SELF_BOUND)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(cut_prompt=cut_prompts())
def test_any_cut_equals_one_shot_and_transformers(tiny: Pair, cut_prompt: tuple[list[int], list[int]]) -> None:
    check_cut_prompt(tiny, *cut_prompt)


@pytest.mark.slow
@settings(max_examples=80, deadline=None, derandomize=True)
@given(cut_prompt=cut_prompts())
def test_many_cuts_equal_one_shot_and_transformers(tiny: Pair, cut_prompt: tuple[list[int], list[int]]) -> None:
    check_cut_prompt(tiny, *cut_prompt)


def test_long_prompt_equals_transformers(make: PairFactory) -> None:
    """Twelve times the indexer's budget: scored in chunks, prefilled in one piece, decoded twice alike."""
    pair = make(tiny_config_dict(**SMALL, indexer_budget=96), max_seq_len=1280)
    prompt = random_prompt(1100, seed=4, eos=(100, 101, 700, 1099))
    core = pair.core(prefill_chunk=2048)
    (tokens, logprobs), again = (generate_greedy(core, [prompt], 6)[0] for _ in range(2))
    expected = pair.check(prompt + tokens)[len(prompt) - 1 : -1]
    assert_logits_equal(expected.log_softmax(-1), logprobs, REFERENCE_BOUND)
    assert again[0] == tokens
    assert torch.equal(again[1], logprobs)
