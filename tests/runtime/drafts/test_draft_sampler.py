"""Drafts from a head's logits, without a head."""

from __future__ import annotations

import pytest
import torch
from distributions import assert_drawn_from
from draft_requests import requests_of
from torch import Tensor

from qwen4exp_trt.runtime.drafts.draft_sampler import DraftRound, DraftSampler
from qwen4exp_trt.runtime.sampler import SampleRequest, draw, greedy_operands
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.step_result import DrawnStep

GREEDY = SamplingParams(temperature=0)
CPU = torch.device("cpu")


def sampler(token_ids: list[int] | None = None, vocab_limit: int | None = None) -> DraftSampler:
    return DraftSampler(None if token_ids is None else torch.tensor(token_ids), 12, vocab_limit, CPU)


def draw_next(drafts: DraftRound, logits: Tensor) -> Tensor:
    """As behind a step of the head."""
    limit = drafts._sampler.limit
    return drafts.draw(DrawnStep(draw(logits, logits, greedy_operands(len(logits)), limit), logits, None))


def of(params: SamplingParams, count: int = 1) -> list[SampleRequest]:
    return requests_of(params, count)


def test_a_greedy_request_gets_the_best_tokens_and_no_distribution() -> None:
    drafts = sampler(vocab_limit=10).start(of(GREEDY, 2))
    logits = torch.eye(12)[[3, 11]]
    assert draw_next(drafts, logits).tolist() == [3, 0], "11 is beyond the limit"
    assert draw_next(drafts, logits[:1] * -1).tolist() == [0], "the second request wants one draft"
    assert drafts.finish() == [([3, 0], None), ([0], None)]


def test_a_sampled_request_draws_from_the_distribution_that_is_kept() -> None:
    """Each draft of a request with noise of its own."""
    params = SamplingParams(temperature=0.8, top_k=6)
    logits = torch.randn(12)
    drafts = sampler().start(of(params, 1500))
    for _ in range(2):
        draw_next(drafts, logits.expand(1500, -1))
    drawn = drafts.finish()
    (first, second), probs = torch.tensor([ids for ids, _ in drawn]).T, drawn[0][1]
    assert probs is not None and torch.equal(probs[0], probs[1])
    assert int((probs[0] > 0).sum()) == 6
    for tokens in (first, second):
        assert_drawn_from(tokens, probs[0])
    both = first * 12 + second
    assert_drawn_from(both, torch.outer(probs[0], probs[1]).flatten())


def test_requests_of_both_kinds_share_a_step() -> None:
    logits = torch.randn(2, 12)
    together = sampler().start([of(GREEDY)[0], of(SamplingParams(seed=1))[0]])
    alone = sampler().start([of(SamplingParams(seed=1))[0]])
    draw_next(together, logits)
    draw_next(alone, logits[1:])
    greedy, sampled = together.finish()
    assert greedy == ([int(logits[0].argmax())], None)
    (expected,) = alone.finish()
    assert sampled[0] == expected[0] and sampled[1] is not None and expected[1] is not None
    assert torch.equal(sampled[1][0], expected[1][0])


def test_a_reduced_vocabulary_gives_ids_of_the_whole() -> None:
    """Its distribution is over all ids, as the verification wants it."""
    drafts = sampler([1, 4, 7, 11], vocab_limit=10).start([*of(GREEDY), *of(SamplingParams(temperature=1.0))])
    logits = torch.tensor([[0.0, 1.0, 2.0, 9.0]]).expand(2, -1)
    assert draw_next(drafts, logits).tolist()[0] == 7, "11 is beyond the limit"
    greedy, (token_ids, probs) = drafts.finish()
    assert greedy == ([7], None)
    assert probs is not None and probs[0].shape == (12,) and token_ids[0] in (1, 4, 7)
    assert probs[0].nonzero().flatten().tolist() == [1, 4, 7]
    assert float(probs[0].sum()) == pytest.approx(1)


def test_penalties_count_the_tokens_of_the_request() -> None:
    """Its history is 1, 2 and 3, 4 behind them."""
    params = SamplingParams(temperature=0, presence_penalty=2.0)
    logits = torch.zeros(1, 12)
    logits[0, 4], logits[0, 8] = 1.5, 1.0
    for token_ids, row in ((None, logits), ([2, 4, 8], logits[:, [2, 4, 8]])):
        drafts = sampler(token_ids).start(of(params))
        assert draw_next(drafts, row).tolist() == [8]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams()], ids=["greedy", "sampled"])
def test_drafts_end_where_the_logits_are_unusable(params: SamplingParams) -> None:
    """The head goes on with some id, so that nobody waits."""
    drafts = sampler().start(of(params))
    logits = torch.randn(1, 12)
    draw_next(drafts, logits)
    assert draw_next(drafts, torch.full((1, 12), torch.nan)).tolist() == [0]
    draw_next(drafts, logits)
    ((token_ids, probs),) = drafts.finish()
    assert len(token_ids) == 1 and (probs is None or len(probs) == 1)
