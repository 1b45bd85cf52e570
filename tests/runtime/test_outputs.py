from __future__ import annotations

from tiny_tokenizer import tiny_backend

from qwen4exp_trt.runtime.metrics import RequestMetrics
from qwen4exp_trt.runtime.outputs import CompletionOutput, Logprob, RequestOutput, logprobs_from_sampled
from qwen4exp_trt.runtime.sampler import SampledToken
from qwen4exp_trt.runtime.tokenizer import Tokenizer


def test_sampled_token_comes_first_with_its_own_rank() -> None:
    sampled = SampledToken(token_id=9, logprob=-3.0, rank=7, top_logprobs={4: -0.5, 2: -1.0})
    entry = logprobs_from_sampled(sampled, None)
    assert entry == {9: Logprob(-3.0, 7, None), 4: Logprob(-0.5, 1, None), 2: Logprob(-1.0, 2, None)}
    assert entry is not None and list(entry) == [9, 4, 2]


def test_sampled_token_among_the_alternatives_is_listed_once() -> None:
    sampled = SampledToken(token_id=2, logprob=-1.0, rank=2, top_logprobs={4: -0.5, 2: -1.0, 7: -2.0})
    entry = logprobs_from_sampled(sampled, None)
    assert entry is not None and list(entry) == [2, 4, 7]
    assert [logprob.rank for logprob in entry.values()] == [2, 1, 3]


def test_only_the_sampled_token_or_nothing_on_request() -> None:
    assert logprobs_from_sampled(SampledToken(1, -0.1, 1, {}), None) == {1: Logprob(-0.1, 1, None)}
    assert logprobs_from_sampled(SampledToken(1, -0.1, 1, None), None) is None


def test_tokens_are_decoded_alone_special_ones_too() -> None:
    tokenizer = Tokenizer(tiny_backend())
    special, part = tokenizer.encode("<|im_end|>")[0], tokenizer.encode("\U0001f9ff")[0]
    entry = logprobs_from_sampled(SampledToken(special, -0.1, 1, {part: -2.0}), tokenizer)
    assert entry is not None
    assert [logprob.decoded_token for logprob in entry.values()] == ["<|im_end|>", "\ufffd"]


def test_request_output_is_shaped_like_vllms() -> None:
    completion = CompletionOutput(0, "hi", [1, 2], None, -0.3, finish_reason="stop", stop_reason=2)
    output = RequestOutput("7", "prompt", [5], [completion], True, RequestMetrics(0.0))
    first = output.outputs[0]
    assert (first.index, first.text, first.token_ids, first.logprobs) == (0, "hi", [1, 2], None)
    assert (first.cumulative_logprob, first.finish_reason, first.stop_reason) == (-0.3, "stop", 2)
    assert (output.request_id, output.prompt, output.prompt_token_ids, output.finished) == ("7", "prompt", [5], True)
