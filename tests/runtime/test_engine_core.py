from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from counting_backend import VOCAB_SIZE, CountingBackend

from qwen4exp_trt.errors import PromptTooLongError, RequestError
from qwen4exp_trt.runtime.engine_core import EngineCore
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.sequence import Sequence

LIMITS = EngineLimits(max_batch_size=2, max_seq_len=32, prefill_chunk=8, block_size=4)
NUM_BLOCKS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=4)


@pytest.fixture
def core() -> EngineCore:
    return EngineCore(CountingBackend(), LIMITS, NUM_BLOCKS, VOCAB_SIZE, (30,), None)


def backend_of(core: EngineCore) -> CountingBackend:
    assert isinstance(core.backend, CountingBackend)
    return core.backend


def add(core: EngineCore, prompt: list[int], params: SamplingParams = GREEDY) -> Sequence:
    sequence = core.make_sequence(None, prompt, params)
    core.add(sequence)
    return sequence


def outputs(sequence: Sequence) -> list[int]:
    return sequence.request_output().outputs[0].token_ids


def is_idle(core: EngineCore) -> bool:
    scheduler = core.scheduler
    free = (scheduler.num_free_slots, scheduler.num_free_blocks)
    return free == (LIMITS.num_slots, NUM_BLOCKS) and scheduler.num_unfinished == 0


def test_prompt_joins_a_decoding_sequence_in_one_step(core: EngineCore) -> None:
    first, second = add(core, [1, 2, 3]), core.make_sequence(None, list(range(10, 30)), GREEDY)
    core.step()
    core.add(second)
    core.step()
    step = backend_of(core).steps[-1]
    assert step["input_ids"] == [4, *range(10, 18)], "one decoded token and a chunk of 8"
    assert (step["query_start_loc"], step["seq_lens"]) == ([0, 1, 9], [4, 8])
    assert step["logits_indices"] == [0], "the chunk samples nothing"
    assert (outputs(first), outputs(second)) == ([4, 5], [])
    while core.scheduler.num_unfinished:
        core.step()
    assert (outputs(first), outputs(second)) == ([4, 5, 6, 7], [30])
    assert (first.finish_reason, second.finish_reason) == ("length", "stop"), "30 is the eos token"
    assert is_idle(core)


@pytest.mark.parametrize("prompts", [([39], [5], [7]), ([5], [39], [7])])
def test_unusable_logits_drop_their_own_sequence_only(core: EngineCore, prompts: tuple[list[int], ...]) -> None:
    sequences = [add(core, prompt) for prompt in prompts]
    while core.scheduler.num_unfinished:
        core.step()
    for prompt, sequence in zip(prompts, sequences, strict=True):
        if prompt == [39]:
            assert outputs(sequence) == [40] and sequence.finish_reason is None
            assert str(sequence.error).startswith(f"request {sequence.request_id} was dropped: its logits have NaN")
        else:
            assert outputs(sequence) == list(range(prompt[0] + 1, prompt[0] + 5)) and sequence.error is None
    assert is_idle(core)


def test_failed_step_drops_what_it_ran_and_nothing_else(core: EngineCore) -> None:
    """The sequences of that step may have moved their states on without a token: they cannot be run again."""
    first, second, waiting = (add(core, prompt) for prompt in ([1], [5], [7]))
    core.step()
    backend_of(core).error = error = RuntimeError("broken")
    with pytest.raises(RuntimeError, match="broken"):
        core.step()
    for sequence in (first, second):
        assert "was dropped: a step failed that it shared" in str(sequence.error)
        assert sequence.error is not None and sequence.error.__cause__ is error
    assert waiting.error is None
    backend_of(core).error = None
    while core.scheduler.num_unfinished:
        core.step()
    assert (outputs(first), outputs(second), outputs(waiting)) == ([2], [6], [8, 9, 10, 11])
    assert is_idle(core)


def test_a_step_of_nothing_does_nothing(core: EngineCore) -> None:
    core.step()
    assert backend_of(core).steps == []


@pytest.mark.parametrize("error", [RuntimeError("broken"), KeyboardInterrupt()])
def test_failing_backend_leaves_nothing_behind(core: EngineCore, error: BaseException) -> None:
    sequence, backend = add(core, [1]), backend_of(core)
    backend.error = error
    with pytest.raises(type(error)):
        core.step()
    assert sequence.error is not None and sequence.error.__cause__ is error
    assert is_idle(core)
    backend.error = None
    following = add(core, [1])
    core.step()
    assert outputs(following) == [2]


@pytest.mark.parametrize(
    "token_ids",
    [
        (1, 2, 3),
        range(1, 4),
        np.array([1, 2, 3]),
        np.array([1, 2, 3], dtype=np.uint8),
        [np.int64(1), 2, torch.tensor(3)],
        torch.tensor([1, 2, 3], dtype=torch.int32),
        iter([1, 2, 3]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_integers_of_any_class(core: EngineCore, token_ids: Any) -> None:
    sequence = core.make_sequence(None, token_ids, GREEDY)
    assert sequence.token_ids == [1, 2, 3]
    assert {type(token) for token in sequence.token_ids} == {int}


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "the prompt is empty; give at least one token"),
        (torch.tensor([]), "the prompt is empty"),
        ([1, 50], "prompt token 50 is not an id of 0 to 49"),
        ([-1], "prompt token -1 is not an id of 0 to 49"),
        ([1.0], r"prompt token 1\.0 is not an id"),
        ([True], "prompt token True is not an id"),
        (["1"], "prompt token '1' is not an id"),
        ([None], "prompt token None is not an id"),
        ([[1, 2]], r"prompt token \[1, 2\] is not an id"),
        (np.array([1.0]), "prompt token .*1.0.* is not an id"),
        (np.array([True]), "prompt token .*True.* is not an id"),
        (torch.tensor([True]), "prompt token .*True.* is not an id"),
        (torch.tensor([[1, 2]]), "prompt token .* is not an id"),
        ("abc", "prompt token ids are a str; a list of integers was expected"),
        (b"abc", "prompt token ids are a bytes"),
        ({1: 2}, "prompt token ids are a dict"),
        (5, "prompt token ids are a int"),
        (torch.tensor(5), "prompt token ids are a int"),
        (None, "prompt token ids are a NoneType"),
        ([1] * 32, r"the prompt has 32 tokens, but this bundle takes at most 31 \(max_seq_len 32\); shorten it or"),
    ],
)
def test_prompts_that_are_refused(core: EngineCore, token_ids: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        core.make_sequence(None, token_ids, GREEDY)
    assert core.scheduler.num_unfinished == 0


def test_longest_prompt_leaves_room_for_one_token(core: EngineCore) -> None:
    sequence = add(core, [1] * 31, SamplingParams(temperature=0, max_tokens=None))
    while core.scheduler.num_unfinished:
        core.step()
    assert (outputs(sequence), sequence.finish_reason) == ([2], "length")


def test_a_request_must_fit_the_pages_and_one_without_max_tokens_ends_with_them() -> None:
    core = EngineCore(CountingBackend(), LIMITS, 2, VOCAB_SIZE, (), None)
    core.make_sequence(None, [1] * 4, SamplingParams(max_tokens=4))
    with pytest.raises(RequestError, match="may take 9 tokens, 3 pages of the KV cache, but there are 2"):
        core.make_sequence(None, [1] * 4, SamplingParams(max_tokens=5))
    sequence = core.make_sequence(None, [1] * 4, SamplingParams(max_tokens=None, ignore_eos=True))
    core.add(sequence)
    while sequence.finish_reason is None:
        core.step()
    assert (sequence.num_output_tokens, sequence.finish_reason) == (4, "length")
    with pytest.raises(PromptTooLongError, match="8 tokens, but the KV cache has room for 8 in its 2 pages"):
        core.make_sequence(None, [1] * 8, SamplingParams())


def test_stop_strings_need_a_tokenizer_and_stop_tokens_the_vocabulary(core: EngineCore) -> None:
    with pytest.raises(RequestError, match="stop needs text, but this bundle has no tokenizer; use stop_token_ids"):
        core.make_sequence(None, [1], SamplingParams(stop="x"))
    with pytest.raises(RequestError, match=r"stop_token_ids \[50\] are not below the vocabulary size 50"):
        core.make_sequence(None, [1], SamplingParams(stop_token_ids=[4, 50]))


def test_score_takes_chunks_of_what_a_step_returns(core: EngineCore) -> None:
    logits = core.score(range(1, 21))
    assert (logits.shape, logits.dtype) == ((20, VOCAB_SIZE), torch.float32)
    assert logits.argmax(-1).tolist() == list(range(2, 22))
    assert [len(step["input_ids"]) for step in backend_of(core).steps] == [8, 8, 4]
    assert is_idle(core)


def test_score_takes_a_prompt_of_the_longest_length(core: EngineCore) -> None:
    assert core.score([1] * 32).shape == (32, VOCAB_SIZE)
    with pytest.raises(RequestError, match="the prompt has 33 tokens, but this bundle takes at most 32"):
        core.score([1] * 33)


def test_score_beside_open_requests(core: EngineCore) -> None:
    open_request = add(core, [1, 2])
    core.step()
    assert core.score([5, 6]).shape == (2, VOCAB_SIZE)
    slots = [step["slot_ids"] for step in backend_of(core).steps]
    assert slots[0] != slots[1], "the open request's states are its own"
    second = add(core, [3])
    core.step()
    with pytest.raises(RequestError, match="2 open requests leave no slot or too few pages to score 2 tokens; finish"):
        core.score([5, 6])
    core.abort(second)
    assert core.score([5, 6]).shape == (2, VOCAB_SIZE)
    while core.scheduler.num_unfinished:
        core.step()
    assert outputs(open_request) == [3, 4, 5, 6]
    assert is_idle(core)


def test_score_that_fails_returns_its_memory(core: EngineCore) -> None:
    backend_of(core).error = RuntimeError("broken")
    with pytest.raises(RuntimeError):
        core.score([1, 2])
    assert is_idle(core)
