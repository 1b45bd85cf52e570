"""`LLM.generate` and `LLM.score` on a bundle of a tiny random model."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import bundles
import pytest
import torch
from serving import generated, ids, observed_steps
from torch import Tensor

from qwen4exp_trt.errors import RequestError
from qwen4exp_trt.runtime import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=6, ignore_eos=True)
TEXT = "the quick brown fox"


# --- prompts ---------------------------------------------------------------------------------------------------------


def test_one_prompt_in_every_form(llm: LLM) -> None:
    assert llm.tokenizer is not None
    token_ids = llm.tokenizer.encode(TEXT)
    forms = [TEXT, {"prompt": TEXT}, ids(token_ids), ids(torch.tensor(token_ids)), [TEXT], [ids(token_ids)]]
    results = [llm.generate(form, GREEDY) for form in forms]
    assert [len(result) for result in results] == [1] * len(forms)
    assert {tuple(generated(result[0])) for result in results} == {tuple(generated(results[0][0]))}
    first, from_ids = results[0][0], results[2][0]
    assert (first.prompt, first.prompt_token_ids, first.finished) == (TEXT, token_ids, True)
    assert (from_ids.prompt, from_ids.prompt_token_ids) == (None, token_ids)
    assert first.outputs[0].text == llm.tokenizer.decode(generated(first))


def test_more_requests_than_slots_keep_their_order_and_their_tokens(llm: LLM) -> None:
    """Lengths above and below the chunk, in one call against one by one."""
    prompts = [ids([10 + index] * length) for index, length in enumerate([3, 20, 1, 8, 9, 40, 2])]
    with observed_steps(llm) as steps:
        results = llm.generate(prompts, GREEDY)
    assert [result.prompt_token_ids for result in results] == [prompt["prompt_token_ids"] for prompt in prompts]
    assert [generated(result) for result in results] == [
        generated(llm.generate(prompt, GREEDY)[0]) for prompt in prompts
    ]
    assert len({result.request_id for result in results}) == len(prompts)
    assert max(len(step["seq_lens"]) for step in steps) == 3
    lengths = [{end - start for start, end in pairwise(step["query_start_loc"])} for step in steps]
    assert any(1 in counts and max(counts) > 1 for counts in lengths), "a chunk of a prompt and a decoded token in one"


def test_no_prompts(llm: LLM) -> None:
    assert llm.generate([]) == []
    assert llm.generate([], []) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("", "the prompt is empty; give at least one token"),
        (ids([]), "the prompt is empty"),
        ([TEXT, ""], "the prompt is empty"),
        ({"prompt": 5}, "a text prompt must be a str, not int: 5"),
        ({"text": TEXT}, r"prompt \{'text': .*\} is neither text nor a dict with 'prompt' or 'prompt_token_ids'"),
        ([5, 6], "prompt 5 is neither text nor a dict"),
        ([[5, 6]], r"prompt \[5, 6\] is neither text nor a dict"),
        (b"bytes", "prompts are a bytes; a list was expected"),
        (5, "prompts are a int; a list was expected"),
        (None, "prompts are a NoneType; a list was expected"),
        (ids([384]), "prompt token 384 is not an id of 0 to 383"),
        (ids([True]), "prompt token True is not an id"),
        (ids([5] * 64), r"the prompt has 64 tokens, but this bundle takes at most 63 \(max_seq_len 64\)"),
    ],
)
def test_bad_prompts_are_refused_before_anything_runs(llm: LLM, prompts: Any, message: str) -> None:
    with observed_steps(llm) as steps, pytest.raises(RequestError, match=message):
        llm.generate(prompts, GREEDY)
    assert steps == []


def test_longest_prompt(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    (result,) = llm.generate(ids([5] * 63), params)
    assert (len(generated(result)), result.outputs[0].finish_reason) == (1, "length")
    (result,) = llm.generate(ids([5] * 60), params)
    assert len(generated(result)) == 4, "max_tokens None goes up to max_seq_len"


# --- parameters ------------------------------------------------------------------------------------------------------


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [GREEDY, SEEDED, SamplingParams(temperature=0, max_tokens=2, logprobs=1, ignore_eos=True)]
    results = llm.generate([TEXT] * 3, params)
    assert [generated(result) for result in results] == [generated(llm.generate(TEXT, one)[0]) for one in params]
    assert [result.outputs[0].logprobs is None for result in results] == [True, True, False]


def test_default_parameters_are_those_of_the_generation_config(llm: LLM) -> None:
    assert llm.default_sampling_params == SamplingParams(temperature=0.7, top_k=20)
    torch.manual_seed(1)
    by_default = llm.generate(TEXT)[0]
    torch.manual_seed(1)
    assert generated(by_default) == generated(llm.generate(TEXT, SamplingParams(temperature=0.7, top_k=20))[0])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([GREEDY], "1 SamplingParams for 2 prompts; give one, or one for each prompt"),
        ([GREEDY] * 3, "3 SamplingParams for 2 prompts"),
        ([GREEDY, None], "params has None; SamplingParams were expected"),
        ({"temperature": 0}, "params are a dict; a list was expected"),
        ([GREEDY, SamplingParams(stop_token_ids=[999])], r"stop_token_ids \[999\] are not below the vocabulary size"),
    ],
)
def test_bad_parameters(llm: LLM, params: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm.generate([TEXT, TEXT], params)


def test_seed_gives_the_same_tokens_whatever_runs_beside(llm: LLM) -> None:
    alone = generated(llm.generate(TEXT, SEEDED)[0])
    others = [SamplingParams(max_tokens=9, ignore_eos=True), SamplingParams(seed=8, max_tokens=6, ignore_eos=True)]
    results = llm.generate([ids([9] * 20), TEXT, TEXT], [others[0], SEEDED, others[1]])
    assert generated(results[1]) == alone
    assert generated(results[2]) != alone, "another seed"


def test_padding_of_the_vocabulary_is_never_sampled(llm: LLM) -> None:
    assert llm.tokenizer is not None and llm.tokenizer.vocab_size < bundles.VOCAB_SIZE
    (result,) = llm.generate(
        TEXT, SamplingParams(temperature=1e6, seed=0, max_tokens=40, ignore_eos=True, logprobs=400)
    )
    assert max(generated(result)) < llm.tokenizer.vocab_size
    assert {len(entry) for entry in result.outputs[0].logprobs or []} == {llm.tokenizer.vocab_size}


def test_penalties_change_what_repeats(llm: LLM) -> None:
    prompt = ids(list(range(100, 110)))
    plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    presence = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, presence_penalty=2.0)
    repetition = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, repetition_penalty=100.0)
    tokens = [generated(result) for result in llm.generate([prompt] * 3, [plain, presence, repetition])]
    assert len(set(tokens[0])) < len(set(tokens[1])) <= 40
    assert len(set(tokens[2])) == 40, "no token twice"
    assert not set(tokens[2]) & set(prompt["prompt_token_ids"]), "nor one of the prompt"


# --- the end of an output --------------------------------------------------------------------------------------------


def test_stop_tokens_end_an_output_and_are_kept(llm: LLM) -> None:
    tokens = generated(llm.generate(TEXT, GREEDY)[0])
    stop = tokens[3]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, stop_token_ids=[stop])
    output = llm.generate(TEXT, params)[0].outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == (
        tokens[: tokens.index(stop) + 1],
        "stop",
        stop,
    )


@pytest.mark.parametrize("eos", [bundles.ENDOFTEXT, bundles.IM_END])
def test_every_eos_ends_an_output_unless_ignored(llm: LLM, eos: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The eos of the config and that of the generation config; the head is moved to favour it."""
    assert set(llm.manifest.stop_token_ids) == {bundles.ENDOFTEXT, bundles.IM_END}
    backend = llm.core.backend

    class FavoursEos:
        prefetch = staticmethod(backend.prefetch)

        def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
            logits = backend.run(inputs).clone()
            logits[:, eos] = 1e3
            return logits

    monkeypatch.setattr(llm.core, "backend", FavoursEos())
    output = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=3))[0].outputs[0]
    assert (output.token_ids, output.finish_reason, output.stop_reason) == ([eos], "stop", eos)
    assert output.text == ""
    output = llm.generate(TEXT, SamplingParams(temperature=0, max_tokens=3, ignore_eos=True))[0].outputs[0]
    assert (output.token_ids, output.finish_reason) == ([eos] * 3, "length")


def test_stop_string_ends_the_text_before_it(llm: LLM) -> None:
    params = {"temperature": 0, "max_tokens": 30, "ignore_eos": True}
    text = llm.generate(TEXT, SamplingParams(**params))[0].outputs[0].text
    stop = text[len(text) // 2 :][:2]
    output = llm.generate(TEXT, SamplingParams(**params, stop=[stop]))[0].outputs[0]
    assert output.text == text[: text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    kept = llm.generate(TEXT, SamplingParams(**params, stop=stop, include_stop_str_in_output=True))[0].outputs[0]
    assert kept.text == output.text + stop


# --- log-probabilities and scores ------------------------------------------------------------------------------------


def test_logprobs_are_those_of_score(llm: LLM) -> None:
    assert llm.tokenizer is not None
    prompt, num_tokens = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14], llm.tokenizer.vocab_size
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True, logprobs=4)
    output = llm.generate(ids(prompt), params)[0].outputs[0]
    expected = llm.score(prompt + output.token_ids).log_softmax(-1)[len(prompt) - 1 : -1]
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids) == 20
    for entry, row, token in zip(output.logprobs, expected, output.token_ids, strict=True):
        assert next(iter(entry)) == token, "the sampled token comes first"
        assert len(entry) in (4, 5)
        values = torch.tensor([logprob.logprob for logprob in entry.values()])
        assert torch.allclose(values, row[list(entry)], atol=1e-4)
        assert entry[token].rank == 1 + int((row[:num_tokens] > row[token]).sum()), "among those that have a token"
        assert entry[token].decoded_token is not None
    assert output.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for e, t in zip(output.logprobs, output.token_ids, strict=True))
    )


def test_score_is_the_logits_of_every_token(llm: LLM) -> None:
    tokens = generated(llm.generate(ids([5] * 10), GREEDY)[0])
    logits = llm.score([5] * 10 + tokens)
    assert (tuple(logits.shape), logits.dtype) == ((16, bundles.VOCAB_SIZE), torch.float32)
    assert logits.isfinite().all()
    limit = llm.tokenizer.vocab_size if llm.tokenizer else None
    assert logits[9:-1, :limit].argmax(-1).tolist() == tokens
    assert llm.score(torch.tensor([5] * 64)).shape[0] == 64, "as long as max_seq_len"


def test_score_does_not_depend_on_the_chunk_it_is_in(llm: LLM) -> None:
    tokens = list(range(30, 60))
    whole = llm.score(tokens)
    for length in (1, 7, 8, 9, 17):
        assert torch.allclose(llm.score(tokens[:length]), whole[:length], atol=1e-5), length


def test_the_lowest_priority_runs_first(tiny_bundle: Path) -> None:
    llm = LLM(tiny_bundle, max_num_seqs=1)
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    outputs = llm.generate(["a", "b", "c"], params, priority=[5, 0, -5])
    finished = [output.metrics.finished_time or 0.0 for output in outputs]
    assert finished == sorted(finished, reverse=True)
    with pytest.raises(RequestError, match="2 priorities for 1 prompts; give one for each prompt"):
        llm.generate("a", params, priority=[1, 2])
