from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qwen4exp_trt.runtime.sampler import SampledToken, SampleRequest, TokenHistory, sample, seed_of
from qwen4exp_trt.runtime.sampling_params import SamplingParams


def _history(prompt: Sequence[int] = (), output: Sequence[int] = ()) -> TokenHistory:
    history = TokenHistory(prompt)
    for token_id in output:
        history.append(token_id)
    return history


def _sample_one(
    logits: Sequence[float] | Tensor,
    params: SamplingParams,
    history: TokenHistory | None = None,
    vocab_limit: int | None = None,
) -> SampledToken:
    row = torch.as_tensor(logits, dtype=torch.float32).unsqueeze(0)
    (token,) = sample(row, [_request(params, history)], vocab_limit)
    assert token is not None
    return token


def _request(params: SamplingParams, history: TokenHistory | None = None) -> SampleRequest:
    return SampleRequest(params, history or _history(), seed_of(params))


def _sample_many(
    logits: Sequence[float], params: SamplingParams, count: int, history: TokenHistory | None = None
) -> Tensor:
    """Relative frequency of each token in ``count`` unseeded draws of one batch."""
    rows = torch.tensor([list(logits)]).repeat(count, 1)
    sampled = sample(rows, [_request(params, history) for _ in range(count)], None)
    ids = torch.tensor([token.token_id for token in sampled if token is not None])
    assert len(ids) == count
    return torch.bincount(ids, minlength=len(logits)) / count


def _reference_probs(
    logits: Sequence[float], params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = ()
) -> list[float]:
    """The distribution to sample from, token by token in float64: ties kept, as documented."""
    values = list(logits)
    for token_id in {*prompt, *output}:
        factor = params.repetition_penalty
        values[token_id] = values[token_id] / factor if values[token_id] > 0 else values[token_id] * factor
    for token_id in set(output):
        values[token_id] -= params.presence_penalty
    values = [value / params.temperature for value in values]
    best = max(values)
    ranked = sorted(
        (math.exp(value - best) for value in values if math.exp(value - best) >= params.min_p), reverse=True
    )
    ranked = ranked[: params.top_k] if params.top_k > 0 else ranked
    mass, lowest = 0.0, ranked[0]
    for weight in ranked:
        if params.top_p < 1 and mass / sum(ranked) >= params.top_p:
            break
        mass, lowest = mass + weight, weight
    kept = [math.exp(value - best) if math.exp(value - best) >= lowest else 0.0 for value in values]
    return [weight / sum(kept) for weight in kept]


# Greedy


def test_greedy_takes_the_best_token_and_leaves_the_logits_alone() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, -1.0, 4.0]])
    before = logits.clone()
    params = SamplingParams(temperature=0, repetition_penalty=1.5, presence_penalty=0.5)
    sampled = sample(logits, [_request(params, _history([0])), _request(params, _history([], [2]))], None)
    assert [token.token_id for token in sampled if token is not None] == [1, 0]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("size", [5, 100_003])
def test_greedy_takes_the_lowest_id_of_equal_tokens(size: int) -> None:
    logits = torch.zeros(size)
    logits[size // 2 :] = 2.0
    assert _sample_one(logits, SamplingParams(temperature=0)).token_id == size // 2


def test_greedy_ignores_filters_seed_and_global_noise() -> None:
    fields = {"temperature": 0, "top_k": 2, "top_p": 0.1, "min_p": 0.5}
    ids = {_sample_one([1.0, 1.1, 0.9], SamplingParams(seed=seed, **fields)).token_id for seed in range(20)}
    assert ids == {1}


def test_empty_batch() -> None:
    assert sample(torch.zeros(0, 7), [], None) == []


# Penalties


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_of_prompt_and_output() -> None:
    params = SamplingParams(temperature=0, repetition_penalty=2.0)
    assert _sample_one([3.0, 2.0, 0.0], params, _history([0])).token_id == 1
    assert _sample_one([3.0, 2.0, 0.0], params, _history([], [0])).token_id == 1
    assert _sample_one([-1.0, -1.5, -9.0], params, _history([0])).token_id == 1
    assert _sample_one([3.0, 2.0, 1.6], params, _history([0], [1])).token_id == 2


def test_presence_penalty_counts_output_tokens_once() -> None:
    params = SamplingParams(temperature=0, presence_penalty=1.0)
    assert _sample_one([3.0, 2.5], params, _history([0])).token_id == 0
    assert _sample_one([3.0, 2.5], params, _history([], [0])).token_id == 1
    assert _sample_one([3.0, 1.5], params, _history([], [0, 0, 0])).token_id == 0


def test_history_is_followed_from_step_to_step() -> None:
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    history = _history([3])
    picked = []
    for _ in range(4):
        picked.append(_sample_one([4.0, 3.0, 2.5, 1.0], params, history).token_id)
        history.append(picked[-1])
    assert picked == [0, 1, 2, 0]


# Random sampling against the slow reference

_FILTERED: dict[str, dict[str, Any]] = {
    "plain": {},
    "hot": {"temperature": 2.5},
    "cold": {"temperature": 0.4},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.3},
    "top_k_then_top_p": {"top_k": 4, "top_p": 0.8},
    "min_p_then_top_p": {"min_p": 0.2, "top_p": 0.75, "temperature": 0.8},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.7},
    "all": {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.05, "presence_penalty": 1.5},
}
_LOGITS = (1.9, 1.2, 1.2, 0.5, 0.1, -0.4, -1.0, -3.0)
_PROMPT, _OUTPUT = (0, 3, 6), (1, 4)
_DRAWS = 1500


def _is_within_five_sigma(frequencies: Tensor, probs: Sequence[float]) -> bool:
    sigmas = [math.sqrt(prob * (1 - prob) / _DRAWS) for prob in probs]
    return all(
        abs(frequency - prob) <= 5 * sigma
        for frequency, prob, sigma in zip(frequencies.tolist(), probs, sigmas, strict=True)
    )


@pytest.mark.parametrize("fields", _FILTERED.values(), ids=_FILTERED.keys())
def test_frequencies_are_those_of_the_reference(fields: dict[str, Any]) -> None:
    torch.manual_seed(0)
    params = SamplingParams(**fields)
    frequencies = _sample_many(_LOGITS, params, _DRAWS, _history(_PROMPT, _OUTPUT))
    assert _is_within_five_sigma(frequencies, _reference_probs(_LOGITS, params, _PROMPT, _OUTPUT))


@pytest.mark.parametrize("name", [name for name in _FILTERED if name != "plain"])
def test_the_five_sigma_bound_tells_the_cases_apart(name: str) -> None:
    torch.manual_seed(0)
    frequencies = _sample_many(_LOGITS, SamplingParams(), _DRAWS)
    assert not _is_within_five_sigma(
        frequencies, _reference_probs(_LOGITS, SamplingParams(**_FILTERED[name]), _PROMPT, _OUTPUT)
    )


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.integers(-8, 8).map(lambda value: value / 4), min_size=1, max_size=12),
    temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]),
    top_k=st.integers(-1, 14),
    top_p=st.sampled_from([0.05, 0.3, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_no_draw_falls_outside_of_the_reference_support(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    # A hair wider, for sums that land on the bound within float32 rounding.
    wider = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=min(1.0, top_p + 1e-5), min_p=max(0.0, min_p - 1e-5)
    )
    probs = torch.tensor(_reference_probs(logits, wider))
    frequencies = _sample_many(logits, params, 25)
    assert not frequencies[probs == 0].any()


def test_tokens_that_tie_with_the_last_kept_one_are_kept() -> None:
    torch.manual_seed(0)
    for params in (SamplingParams(top_k=2), SamplingParams(top_p=0.5)):
        frequencies = _sample_many([2.0, 1.0, 1.0, 1.0, -5.0], params, 200)
        assert (frequencies[:4] > 0).all() and frequencies[4] == 0


def test_min_p_comes_before_top_p() -> None:
    """Of 0.4, 0.3 and three 0.1, min-p leaves 4/7 and 3/7: the first alone then holds 0.55 of the mass."""
    logits = [math.log(prob) for prob in (0.4, 0.3, 0.1, 0.1, 0.1)]
    frequencies = _sample_many(logits, SamplingParams(min_p=0.5, top_p=0.55), 100)
    assert frequencies.tolist() == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("temperature", [1e-5, 1e6])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    torch.manual_seed(0)
    frequencies = _sample_many([1e35, 1e35, -1e35, 3.0], SamplingParams(temperature=temperature, top_p=0.9), 50)
    assert (frequencies[:2] > 0).all() and not frequencies[2:].any()


# Seeds


def _seeded_tokens(batch: Sequence[tuple[Tensor, SamplingParams]], steps: int) -> list[list[int]]:
    """Tokens of each request of ``batch``, all in one batch, its logits shifted from step to step."""
    requests = [_request(params, _history([1, 2])) for _, params in batch]
    tokens: list[list[int]] = [[] for _ in batch]
    for step in range(steps):
        rows = torch.stack([logits.roll(step) for logits, _ in batch])
        for request, token, drawn in zip(requests, sample(rows, requests, None), tokens, strict=True):
            assert token is not None
            request.history.append(token.token_id)
            drawn.append(token.token_id)
    return tokens


def test_seeded_requests_do_not_depend_on_their_batch() -> None:
    torch.manual_seed(1)
    size = 300
    requests = [
        (torch.randn(size), SamplingParams(seed=7)),
        (torch.randn(size), SamplingParams(seed=7, top_k=20, top_p=0.95, presence_penalty=1.5)),
        (torch.randn(size), SamplingParams(temperature=0)),
        (torch.randn(size).round(), SamplingParams(seed=8, top_k=5, logprobs=3)),
        (torch.randn(size), SamplingParams(temperature=1.5)),
        (torch.randn(size), SamplingParams(seed=-5, top_p=0.8, min_p=0.01, repetition_penalty=1.2)),
    ]
    together = _seeded_tokens(requests, 12)
    backwards = _seeded_tokens(requests[::-1], 12)[::-1]
    for request, (logits, params) in enumerate(requests):
        if params.seed is not None or params.is_greedy:
            torch.manual_seed(request)
            alone = _seeded_tokens([(logits, params)], 12)[0]
            assert alone == together[request] == backwards[request]


def test_seeds_and_steps_differ() -> None:
    logits = torch.zeros(1000)
    first, second = _seeded_tokens([(logits, SamplingParams(seed=1)), (logits, SamplingParams(seed=2))], 8)
    assert first != second
    assert len(set(first)) > 1


def test_no_seed_means_torchs_default_generator() -> None:
    drawn = []
    for _ in range(2):
        torch.manual_seed(42)
        drawn.append([_sample_one(torch.zeros(1000), SamplingParams()).token_id for _ in range(4)])
    assert drawn[0] == drawn[1]


# Log-probabilities


def test_logprobs_are_those_of_the_raw_logits() -> None:
    torch.manual_seed(0)
    logits = torch.randn(50) * 3
    expected = logits.log_softmax(-1)
    params = SamplingParams(temperature=0.3, top_k=3, repetition_penalty=2.0, presence_penalty=1.0, logprobs=4)
    token = _sample_one(logits, params, _history([3], [int(logits.argmax())]))
    assert token.logprob == pytest.approx(float(expected[token.token_id]), abs=1e-5)
    assert token.rank == int((expected > expected[token.token_id]).sum()) + 1
    assert token.top_logprobs is not None
    assert list(token.top_logprobs) == expected.topk(4).indices.tolist()
    assert list(token.top_logprobs.values()) == pytest.approx(expected.topk(4).values.tolist(), abs=1e-5)


def test_number_of_top_logprobs() -> None:
    logits = [0.5, 2.0, 2.0, -1.0]
    assert _sample_one(logits, SamplingParams(temperature=0)).top_logprobs is None
    assert _sample_one(logits, SamplingParams(temperature=0, logprobs=0)).top_logprobs == {}
    top = _sample_one(logits, SamplingParams(temperature=0, logprobs=99)).top_logprobs
    assert top is not None and list(top) == [1, 2, 0, 3]


def test_rank_of_tied_tokens_is_shared() -> None:
    token = _sample_one([2.0, 2.0, 1.0], SamplingParams(temperature=0))
    assert (token.token_id, token.rank) == (0, 1)


# Padding rows and damaged logits


@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"top_k": 3}, {"top_p": 0.9, "presence_penalty": 2.0}])
def test_padding_ids_are_never_sampled_or_reported(fields: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits = torch.tensor([1.0, 1.2, 0.8, 9.0, 9.0])
    params = SamplingParams(logprobs=5, **fields)
    for _ in range(20):
        token = _sample_one(logits, params, _history([4], [0]), vocab_limit=3)
        assert token.token_id < 3
        assert token.top_logprobs is not None and sorted(token.top_logprobs) == [0, 1, 2]
        assert token.logprob == pytest.approx(float(logits.log_softmax(-1)[token.token_id]), abs=1e-5)


def test_vocab_limit_above_the_head_changes_nothing() -> None:
    assert _sample_one([0.0, 1.0], SamplingParams(temperature=0), vocab_limit=99).token_id == 1


@pytest.mark.parametrize("row", [[0.0, math.nan], [0.0, math.inf], [-math.inf, -math.inf]])
def test_damaged_rows_are_told_apart(row: list[float]) -> None:
    for params in (SamplingParams(temperature=0), SamplingParams(top_p=0.9, logprobs=1)):
        sampled = sample(torch.tensor([[0.0, 1.0], row, [-math.inf, 0.0]]), [_request(params) for _ in range(3)], None)
        assert [token is not None for token in sampled] == [True, False, True]


@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"top_p": 0.99}, {"repetition_penalty": 1.5}])
def test_masked_tokens_are_never_sampled(fields: dict[str, Any]) -> None:
    torch.manual_seed(0)
    logits = [-math.inf, 0.0, -math.inf]
    ids = {_sample_one(logits, SamplingParams(**fields), _history([0, 1])).token_id for _ in range(20)}
    assert ids == {1}
