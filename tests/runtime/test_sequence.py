from __future__ import annotations

from tiny_tokenizer import tiny_backend

from qwen4exp_trt.runtime.sampler import SampledToken
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.sequence import Sequence
from qwen4exp_trt.runtime.stopping import StopChecker
from qwen4exp_trt.runtime.tokenizer import Tokenizer

TOKENIZER = Tokenizer(tiny_backend())


def make_sequence(prompt: str, **params: object) -> Sequence:
    checked = SamplingParams(**params)  # pyright: ignore[reportArgumentType]
    token_ids = TOKENIZER.encode(prompt)
    checker = StopChecker(checked, (), len(token_ids), 100)
    return Sequence("7", prompt, token_ids, checked, 100, checker, TOKENIZER)


def test_result_grows_with_each_token() -> None:
    sequence, tokens = make_sequence("the", max_tokens=2, logprobs=0), TOKENIZER.encode("fox")
    assert (sequence.num_tokens_left, sequence.num_output_tokens) == (len(sequence.prompt_token_ids), 0)
    before = sequence.request_output()
    sequence.num_computed = sequence.num_tokens_left
    for token in tokens[:2]:
        sequence.append(SampledToken(token, -0.5, 1, {}))
    after = sequence.request_output()
    assert (before.finished, before.outputs[0].token_ids, before.outputs[0].text) == (False, [], "")
    assert (before.outputs[0].logprobs, before.outputs[0].finish_reason) == ([], None)
    assert (after.request_id, after.prompt, after.finished) == ("7", "the", True)
    assert (after.outputs[0].token_ids, after.outputs[0].text) == (tokens[:2], TOKENIZER.decode(tokens[:2]))
    assert (after.outputs[0].cumulative_logprob, after.outputs[0].finish_reason) == (-1.0, "length")
    assert [list(entry) for entry in after.outputs[0].logprobs or []] == [[token] for token in tokens[:2]]
    assert (sequence.num_tokens_left, sequence.num_output_tokens) == (2, 2)


def test_text_that_length_cuts_inside_a_character_is_that_of_decode() -> None:
    tokens = TOKENIZER.encode("\U0001f9ff")
    assert len(tokens) > 2, "the character is in several tokens"
    sequence = make_sequence("the", max_tokens=2)
    for token in tokens[:2]:
        assert sequence.request_output().outputs[0].text == "", "half a character is never shown before the end"
        sequence.append(SampledToken(token, -0.5, 1, None))
    assert sequence.request_output().outputs[0].text == TOKENIZER.decode(tokens[:2]) == "\ufffd"
