"""Drafts in the serving loop: text, stops, lengths, failures and counts are those of decoding without them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path

import bundles
import pytest
import torch
from counting_backend import SamplesLogits
from distributions import assert_same_distribution
from draft_proposers import Propose, drafting_of, right_up_to
from serving import assert_idle, generated, ids, observed_steps
from torch import Tensor

from qwen4exp_trt.errors import DroppedError
from qwen4exp_trt.runtime import LLM, RequestOutput, SamplingParams
from qwen4exp_trt.runtime.__main__ import main
from qwen4exp_trt.runtime.drafts.acceptance import GIVE_UP_AFTER
from qwen4exp_trt.runtime.outputs import CompletionOutput

PROMPTS = ([5, 9, 14, 3, 77, 5, 9], [21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31], [40], [7, 8] * 6)
GREEDY = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True, logprobs=2)
Texts = dict[tuple[int, ...], list[int]]
"""Outputs of prompts."""


@pytest.fixture(scope="module")
def plain(tiny_bundle: Path) -> LLM:
    return LLM(tiny_bundle)


@pytest.fixture(scope="module")
def expected(plain: LLM) -> list[RequestOutput]:
    """Greedy outputs of all prompts without drafts."""
    return plain.generate([ids(prompt) for prompt in PROMPTS], GREEDY)


@pytest.fixture(scope="module")
def texts(expected: list[RequestOutput]) -> Texts:
    return texts_of(expected)


@pytest.fixture
def drafted(tiny_llm: LLM) -> Iterator[LLM]:
    """The tiny model; a test sets its drafts."""
    yield tiny_llm
    tiny_llm.core.drafting = None
    assert_idle(tiny_llm)


def draft(llm: LLM, propose: Propose, max_drafts: int = 7) -> LLM:
    llm.core.drafting = drafting_of(propose, max_drafts)
    return llm


def texts_of(outputs: list[RequestOutput]) -> Texts:
    return {tuple(output.prompt_token_ids): generated(output) for output in outputs}


def assert_equal_outputs(found: CompletionOutput, expected: CompletionOutput) -> None:
    """Of drafted and undrafted decoding: all but the last digits of log-probabilities."""
    for field in ("text", "token_ids", "finish_reason", "stop_reason"):
        assert getattr(found, field) == getattr(expected, field), field
    assert found.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-3)
    for ours, theirs in zip(found.logprobs or [], expected.logprobs or [], strict=True):
        assert ours.keys() == theirs.keys()
        for token_id, entry in ours.items():
            assert entry.rank == theirs[token_id].rank
            assert entry.logprob == pytest.approx(theirs[token_id].logprob, abs=1e-4)


@pytest.mark.parametrize("num_right", [0, 1, 2, 5, 7, None], ids=lambda count: f"{'mixed' if count is None else count}")
def test_greedy_text_is_the_undrafted_one(
    expected: list[RequestOutput], texts: Texts, drafted: LLM, num_right: int | None
) -> None:
    """A batch of prompts, some of which come in while others decode; a wrong draft at every place."""
    cycle = itertools.cycle([3, 0, 7, 1, 4])
    draft(drafted, right_up_to(texts, lambda: next(cycle) if num_right is None else num_right, bundles.VOCAB_SIZE))
    found = drafted.generate([ids(prompt) for prompt in PROMPTS], GREEDY)
    for ours, theirs in zip(found, expected, strict=True):
        assert_equal_outputs(ours.outputs[0], theirs.outputs[0])
    counters = drafted.core.drafting.counters  # pyright: ignore[reportOptionalMemberAccess]
    if num_right is not None:
        assert sum(counters.accepted_per_position[num_right:]) == 0
        assert counters.accepted_per_position[:num_right] == counters.proposed_per_position[:num_right]


def test_accepted_drafts_save_steps(texts: Texts, drafted: LLM) -> None:
    draft(drafted, right_up_to(texts, lambda: 7, bundles.VOCAB_SIZE), max_drafts=3)
    with observed_steps(drafted) as steps:
        (output,) = drafted.generate(ids(PROMPTS[0]), GREEDY)
    lengths = [len(step["input_ids"]) for step in steps]
    assert lengths == [7, 4, 4, 4, 4, 1], "a prompt that gives a token, and 17 more, four a step"
    assert steps[1]["logits_indices"] == [0, 1, 2, 3]
    assert (output.metrics.num_draft_tokens, output.metrics.num_accepted_tokens) == (12, 12)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8])
def test_no_draft_passes_the_longest_output(texts: Texts, drafted: LLM, max_tokens: int) -> None:
    draft(drafted, right_up_to(texts, lambda: 7, bundles.VOCAB_SIZE))
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    with observed_steps(drafted) as steps:
        outputs = drafted.generate([ids(prompt) for prompt in PROMPTS], params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert generated(output) == texts[tuple(prompt)][:max_tokens]
        assert output.outputs[0].finish_reason == "length"
    longest = max(map(len, PROMPTS)) + max_tokens
    assert all(max(step["seq_lens"]) < longest for step in steps)


def test_no_draft_passes_the_longest_sequence(plain: LLM, drafted: LLM) -> None:
    limit = drafted.manifest.limits.max_seq_len
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    text = generated(plain.generate(ids(PROMPTS[0]), params)[0])
    assert len(text) == limit - len(PROMPTS[0])
    draft(drafted, right_up_to({tuple(PROMPTS[0]): text}, lambda: 7, bundles.VOCAB_SIZE))
    with observed_steps(drafted) as steps:
        assert generated(drafted.generate(ids(PROMPTS[0]), params)[0]) == text
    assert max(max(step["seq_lens"]) for step in steps) == limit - 1


@pytest.mark.parametrize("index", range(2, 9))
def test_a_stop_token_inside_accepted_drafts_ends_the_output_there(texts: Texts, drafted: LLM, index: int) -> None:
    text = texts[tuple(PROMPTS[1])]
    draft(drafted, right_up_to(texts, lambda: 7, bundles.VOCAB_SIZE))
    params = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True, stop_token_ids=[text[index]])
    (found,) = drafted.generate(ids(PROMPTS[1]), params)[0].outputs
    assert (found.finish_reason, found.stop_reason) == ("stop", text[index])
    assert found.token_ids == text[: text.index(text[index]) + 1]


def test_a_stop_string_inside_accepted_drafts_ends_the_output_there(
    plain: LLM, expected: list[RequestOutput], texts: Texts, drafted: LLM
) -> None:
    draft(drafted, right_up_to(texts, lambda: 7, bundles.VOCAB_SIZE))
    text = expected[1].outputs[0].text
    tried = 0
    for start in range(1, len(text) - 4, len(text) // 6):
        stop = text[start : start + 3]
        params = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True, stop=[stop])
        undrafted, found = (llm.generate(ids(PROMPTS[1]), params)[0].outputs[0] for llm in (plain, drafted))
        assert_equal_outputs(found, undrafted)
        tried += found.stop_reason == stop
    assert tried > 3, "the text has stop strings"


def test_streamed_pieces_are_the_text_in_order(expected: list[RequestOutput], texts: Texts, drafted: LLM) -> None:
    draft(drafted, right_up_to(texts, lambda: 2, bundles.VOCAB_SIZE))
    chunks = list(drafted.stream(ids(PROMPTS[3]), GREEDY))
    assert "".join(chunk.text for chunk in chunks) == expected[3].outputs[0].text
    assert [token for chunk in chunks for token in chunk.token_ids] == generated(expected[3])
    assert [len(chunk.token_ids) for chunk in chunks[:3]] == [1, 3, 3]
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


def test_a_closed_stream_frees_its_memory_with_drafts_open(texts: Texts, drafted: LLM) -> None:
    draft(drafted, right_up_to(texts, lambda: 2, bundles.VOCAB_SIZE))
    stream = drafted.stream(ids(PROMPTS[0]), GREEDY)
    next(stream), next(stream)
    stream.close()
    assert_idle(drafted)
    assert generated(drafted.generate(ids(PROMPTS[1]), GREEDY)[0]) == texts[tuple(PROMPTS[1])]


def test_drafts_of_no_use_end(plain: LLM, drafted: LLM) -> None:
    """They end for each request alone, and the next request starts afresh."""
    prompts = [PROMPTS[0], PROMPTS[1]]
    params = SamplingParams(temperature=0, max_tokens=GIVE_UP_AFTER + 12, ignore_eos=True)
    texts = {tuple(prompt): generated(plain.generate(ids(prompt), params)[0]) for prompt in prompts}
    right, wrong = (right_up_to(texts, lambda n=n: n, bundles.VOCAB_SIZE) for n in (1, 0))
    draft(drafted, lambda s, n: (right if s.prompt_token_ids == prompts[0] else wrong)(s, n), max_drafts=2)
    for _ in range(2):
        useful, useless = drafted.generate([ids(prompt) for prompt in prompts], params)
        assert (generated(useful), generated(useless)) == tuple(texts.values())
        assert useless.metrics.num_draft_tokens == 2 * GIVE_UP_AFTER
        assert useful.metrics.num_accepted_tokens > GIVE_UP_AFTER // 2
    assert drafted.core.drafting is not None
    assert drafted.core.drafting.counters.num_switched_off == 2


def test_a_row_without_usable_logits_ends_its_request_alone(texts: Texts, drafted: LLM) -> None:
    """Not if the row is behind a rejected draft: then decoding would never have come to it."""
    bad_token = texts[tuple(PROMPTS[1])][5]
    backend = drafted.core.backend

    class Poisoned(SamplesLogits):
        prefetch = staticmethod(backend.prefetch)

        def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
            logits = backend.run(inputs)
            last = inputs["input_ids"][inputs["logits_indices"].long()]
            return logits.masked_fill((last == bad_token)[:, None], torch.nan)

    drafted.core.backend = Poisoned()  # pyright: ignore[reportAttributeAccessIssue]
    try:
        draft(drafted, right_up_to(texts, lambda: 7, bundles.VOCAB_SIZE))
        sequences = [drafted.core.make_sequence(None, prompt, GREEDY) for prompt in PROMPTS[:2]]
        for sequence in sequences:
            drafted.core.add(sequence)
        while drafted.core.scheduler.num_unfinished:
            drafted.core.step()
        assert isinstance(sequences[1].error, DroppedError) and "NaN" in str(sequences[1].error)
        first = texts[tuple(PROMPTS[1])].index(bad_token)
        assert sequences[1].token_ids[len(PROMPTS[1]) :] == texts[tuple(PROMPTS[1])][: first + 1]
        assert sequences[0].error is None and sequences[0].finish_reason == "length"
        draft(drafted, lambda sequence, count: [bad_token] * count)
        (output,) = drafted.generate(ids(PROMPTS[0]), SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        assert generated(output) == texts[tuple(PROMPTS[0])][:6], "a rejected draft's row is not looked at"
    finally:
        drafted.core.backend = backend


def test_a_seed_gives_the_undrafted_text_with_drafts_that_are_not_sampled(plain: LLM, drafted: LLM) -> None:
    """Penalties, filters and log-probabilities included: a row's token does not depend on where drafts come from."""
    params = SamplingParams(
        temperature=0.9, top_p=0.9, top_k=40, seed=11, max_tokens=18, ignore_eos=True, logprobs=1,
        repetition_penalty=1.3, presence_penalty=0.4,
    )  # fmt: skip
    expected = plain.generate([ids(prompt) for prompt in PROMPTS], params)
    cycle = itertools.cycle([2, 7, 0, 4])
    draft(drafted, right_up_to(texts_of(expected), lambda: next(cycle), bundles.VOCAB_SIZE))
    found = drafted.generate([ids(prompt) for prompt in PROMPTS], params)
    for ours, theirs in zip(found, expected, strict=True):
        assert_equal_outputs(ours.outputs[0], theirs.outputs[0])


@pytest.mark.slow
def test_sampled_text_has_the_distribution_of_undrafted_text(plain: LLM, drafted: LLM) -> None:
    """The first three tokens, with drafts that are sometimes right."""
    params = [SamplingParams(temperature=1.0, top_k=3, max_tokens=3, ignore_eos=True, seed=s) for s in range(300)]
    others = [SamplingParams(temperature=1.0, top_k=3, max_tokens=3, ignore_eos=True, seed=s) for s in range(300, 600)]
    prompts = [ids([5, 9, 14])] * 300
    expected = [tuple(generated(output)) for output in plain.generate(prompts, params)]
    common = max(set(expected), key=expected.count)
    draft(drafted, lambda sequence, count: common[sequence.num_output_tokens :])
    found = [tuple(generated(output)) for output in drafted.generate(prompts, others)]
    assert_same_distribution(found, expected)


def test_prompt_lookup_is_chosen_by_the_config(plain: LLM, tiny_bundle: Path) -> None:
    llm = LLM(tiny_bundle, speculate="ngram:4")
    assert (llm.info["speculate"], plain.info["speculate"]) == ("ngram:4", None)
    repeating = SamplingParams(temperature=0, max_tokens=18, ignore_eos=True, repetition_penalty=0.01)
    expected, found = (each.generate([ids(prompt) for prompt in PROMPTS], repeating) for each in (plain, llm))
    for ours, theirs in zip(found, expected, strict=True):
        assert_equal_outputs(ours.outputs[0], theirs.outputs[0])
        assert ours.metrics.num_draft_tokens >= ours.metrics.num_accepted_tokens > 0
    values = {metric.name: metric.samples for metric in llm.core.metrics.collect()}
    proposed = sum(sample.value for sample in values["qwen4exp_spec_decode_num_draft_tokens_per_pos"])
    assert proposed == values["qwen4exp_spec_decode_num_draft_tokens"][0].value > 0
    assert_idle(llm)


def test_drafts_are_a_flag_of_the_command_line(tiny_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    args = [str(tiny_bundle), "the quick", "--temperature", "0", "--max-tokens", "5"]
    outputs = []
    for more in ([], ["--speculate", "ngram:4"]):
        assert main([*args, *more]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]
    assert main([*args, "--speculate", "ngram"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("qwen4exp-generate: error: speculative decoding is 'ngram'; it must be 'mtp:K'")
    assert main([*args, "--speculate", "mtp:3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "draft head" in line and "build" in line, "this bundle has none"
