"""The distribution of verified tokens, row by row."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from distributions import assert_drawn_from
from draft_requests import drafts_of, requests_of
from torch import Tensor

from qwen4exp_trt.plugins.sample_tokens.reference import kept
from qwen4exp_trt.runtime.drafts.rejection import DraftedToken, filtered_probs
from qwen4exp_trt.runtime.sampler import NoiseStream, SampledToken, sample, sampling_operands
from qwen4exp_trt.runtime.sampling_params import SamplingParams

VOCAB = 12
NUM_SAMPLES = 2500

PARAMS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1.3, top_k=5),
    SamplingParams(temperature=0.9, top_p=0.7),
    SamplingParams(temperature=1.0, min_p=0.15),
    SamplingParams(temperature=0.8, top_k=7, top_p=0.85, min_p=0.02),
]


def name_of(params: SamplingParams) -> str:
    return f"t{params.temperature}-k{params.top_k}-p{params.top_p}-m{params.min_p}"


def ids(tokens: list[SampledToken | None]) -> Tensor:
    return torch.tensor([-1 if token is None else token.token_id for token in tokens])


def reference_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    probs = torch.zeros(len(logits), dtype=torch.float64)
    for token, value in kept(logits.tolist(), params.temperature, params.top_k, params.top_p, params.min_p):
        probs[token] = torch.tensor(value, dtype=torch.float64).exp()
    return probs / probs.sum()


@pytest.mark.parametrize("params", PARAMS, ids=name_of)
def test_filtered_probs_are_what_the_sampler_draws_from(params: SamplingParams) -> None:
    """Ties at the end of what is kept included."""
    logits = (torch.randn(8, 203) * 3 * 4).round() / 4
    found = filtered_probs(logits, sampling_operands(requests_of(params, 8)), 200)
    for row, probs in zip(logits, found, strict=True):
        torch.testing.assert_close(probs[:200].double(), reference_probs(row[:200], params), rtol=1e-5, atol=1e-9)
    assert not found[:, 200:].any()


def test_rows_of_one_batch_keep_their_own_filters() -> None:
    logits = torch.randn(len(PARAMS), 203) * 3
    requests = [requests_of(params, 1)[0] for params in PARAMS]
    found = filtered_probs(logits, sampling_operands(requests), None)
    for row, params, probs in zip(logits, PARAMS, found, strict=True):
        torch.testing.assert_close(probs.double(), reference_probs(row, params), rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("params", PARAMS, ids=name_of)
def test_tokens_have_the_distribution_of_undrafted_ones(params: SamplingParams) -> None:
    target, draft = torch.randn(VOCAB) * 1.5, torch.randn(VOCAB) * 1.5
    requests = requests_of(params, NUM_SAMPLES)
    drafts = drafts_of(draft, requests)
    drafted = [replace(request, drafted=drafts[row]) for row, request in enumerate(requests)]
    tokens = ids(sample(target.expand(NUM_SAMPLES, -1), drafted, None))
    expected, proposed = reference_probs(target, params), drafts[0].probs.double()
    assert_drawn_from(tokens, expected)
    accepted = (tokens == torch.tensor([draft.token_id for draft in drafts])).double().mean()
    overlap = torch.minimum(expected, proposed).sum()
    assert abs(accepted - overlap) < 0.05, "a draft is accepted as often as rejection sampling can"


@pytest.mark.parametrize("likely", [True, False])
def test_a_draft_that_was_not_sampled_is_accepted_as_often_as_it_would_be_sampled(likely: bool) -> None:
    """N-gram drafts: q has all its mass on one token, for which exact match is rejection sampling."""
    params = SamplingParams(temperature=0.9, top_p=0.9)
    target = torch.randn(VOCAB)
    expected = reference_probs(target, params)
    tokens = ids(sample(target.expand(NUM_SAMPLES, -1), requests_of(params, NUM_SAMPLES), None))
    draft = int(expected.argmax() if likely else expected.argmin())
    assert_drawn_from(tokens, expected)
    assert abs((tokens == draft).double().mean() - expected[draft]) < 0.05


def test_one_hot_q_and_q_equal_to_p() -> None:
    params = SamplingParams(temperature=1.0)
    target = torch.randn(VOCAB)
    probs = target.softmax(-1)
    requests = requests_of(params, NUM_SAMPLES)
    one_hot = DraftedToken(4, torch.nn.functional.one_hot(torch.tensor(4), VOCAB).float())
    tokens = ids(sample(target.expand(NUM_SAMPLES, -1), [replace(each, drafted=one_hot) for each in requests], None))
    assert_drawn_from(tokens, probs)
    same = drafts_of(target, requests)
    pairs = [replace(request, drafted=same[row]) for row, request in enumerate(requests)]
    tokens = ids(sample(target.expand(NUM_SAMPLES, -1), pairs, None))
    assert tokens.tolist() == [draft.token_id for draft in same], "the draft is what the target wants: always accepted"


def test_a_draft_that_the_filters_drop_is_never_accepted() -> None:
    params = SamplingParams(temperature=1.0, top_k=2)
    target = torch.tensor([0.0, 3.0, 2.5, -1.0])
    draft = DraftedToken(0, torch.tensor([1.0, 0.0, 0.0, 0.0]))
    requests = [replace(each, drafted=draft) for each in requests_of(params, 500)]
    tokens = ids(sample(target.expand(500, -1), requests, None))
    assert_drawn_from(tokens, reference_probs(target, params))


def test_penalties_count_the_drafts_in_front() -> None:
    """The row behind drafts 5 and 6 is penalized for them: its tokens have the distribution of a history with them."""
    params = SamplingParams(temperature=1.0, presence_penalty=1.5, repetition_penalty=1.2)
    target = torch.randn(VOCAB)
    requests = [replace(each, ahead=(5, 6)) for each in requests_of(params, NUM_SAMPLES)]
    values = target.clone()
    seen = torch.tensor([1, 2, 3, 4, 5, 6])
    values[seen] = torch.where(values[seen] > 0, values[seen] / 1.2, values[seen] * 1.2)
    values[seen[2:]] -= 1.5
    expected = values.softmax(-1)
    drafts = drafts_of(torch.randn(VOCAB), requests)
    drafted = [replace(request, drafted=drafts[row]) for row, request in enumerate(requests)]
    for rows in (requests, drafted):
        assert_drawn_from(ids(sample(target.expand(NUM_SAMPLES, -1), rows, None)), expected)
    assert requests[0].history.num_output_tokens == 2, "the history itself is as it was"
    again = sample(target[None], [requests_of(params, 1)[0]], None)
    fresh = sample(target[None], [requests_of(params, 1)[0]], None)
    assert again == fresh, "the marks of drafts leave no trace in the history's masks"


def test_logprob_and_rank_are_of_the_raw_logits() -> None:
    params = SamplingParams(temperature=0.7, top_k=4, logprobs=2)
    target = torch.randn(VOCAB)
    requests = requests_of(params, 40)
    drafts = drafts_of(target + 0.5 * torch.randn(VOCAB), requests)
    drafted = [replace(request, drafted=drafts[row]) for row, request in enumerate(requests)]
    tokens = sample(target.expand(40, -1), drafted, None)
    logprobs = target.log_softmax(-1)
    assert any(token and token.token_id == draft.token_id for token, draft in zip(tokens, drafts, strict=True))
    for token in tokens:
        assert token is not None
        assert token.logprob == pytest.approx(float(logprobs[token.token_id]), abs=1e-5)
        assert token.rank == 1 + int((logprobs > logprobs[token.token_id]).sum())
        assert token.top_logprobs is not None and list(token.top_logprobs) == target.topk(2).indices.tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_unusable_rows_give_no_token_and_spare_the_others(bad: float) -> None:
    params = SamplingParams(temperature=1.0, top_p=0.9)
    logits = torch.randn(2, VOCAB)
    if bad == -torch.inf:
        logits[0] = bad
    else:
        logits[0, 3] = bad
    requests = requests_of(params, 2)
    drafts = drafts_of(torch.randn(VOCAB), requests)
    drafted = [replace(request, drafted=drafts[row]) for row, request in enumerate(requests)]
    tokens = sample(logits, drafted, None)
    assert tokens[0] is None and tokens[1] is not None
    assert tokens[1:] == sample(logits[1:], drafted[1:], None)


def test_streams_of_noise_are_apart() -> None:
    """No two draws of a request read the same noise, whatever the tokens they are for."""
    offsets = {stream.offset(index) for stream in NoiseStream for index in (0, 1, 2**24 - 1)}
    assert len(offsets) == 3 * len(NoiseStream)
    assert max(offsets) < 2**31


def test_the_draws_of_one_token_are_independent() -> None:
    """Draft, acceptance and the token in its place: a shared stream would tie the token to the rejected draft."""
    params = SamplingParams(temperature=1.0)
    target = torch.zeros(4)
    requests = requests_of(params, 4000)
    drafts = drafts_of(torch.tensor([2.0, 2.0, -2.0, -2.0]), requests)
    drafted = [replace(request, drafted=drafts[row]) for row, request in enumerate(requests)]
    tokens = ids(sample(target.expand(4000, -1), drafted, None))
    proposed = torch.tensor([draft.token_id for draft in drafts])
    for draft in (0, 1):
        rejected = tokens[(proposed == draft) & (tokens != proposed)]
        assert_drawn_from(rejected - 2, torch.tensor([0.5, 0.5]))
