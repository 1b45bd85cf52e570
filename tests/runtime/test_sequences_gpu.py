"""Sequences and preemption on a GPU, whose decode steps are captured."""

from __future__ import annotations

from pathlib import Path

import bundles
import pytest
import torch
from serving import assert_idle, generated, ids

from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.scheduler import ScheduledSequence
from qwen4exp_trt.runtime.sequence import Sequence
from qwen4exp_trt.runtime.step_inputs import build_step_inputs

pytestmark = pytest.mark.gpu

PROMPTS = [[(7 * row + 3 * place) % 250 + 5 for place in range(3 + 9 * row)] for row in range(5)]
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
LIMITS = {"max_seq_len": 96, "block_size": 8, "max_batch_size": 4, "prefill_chunk": 32}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.build_for_gpu(tmp_path_factory.mktemp("sequences") / "bundle", "float32", **LIMITS)


@pytest.fixture(scope="module")
def llm(bundle: Path) -> LLM:
    return LLM(bundle, device="cuda", enable_prefix_caching=False)


def test_preempted_text_is_that_of_requests_alone(bundle: Path, llm: LLM) -> None:
    expected = [generated(llm.generate(ids(prompt), GREEDY)[0]) for prompt in PROMPTS]
    for options in ({}, {"speculate": "ngram:3"}, {"enable_prefix_caching": False}):
        crowded = LLM(bundle, device="cuda", num_blocks=14, **options)
        outputs = crowded.generate([ids(prompt) for prompt in PROMPTS], GREEDY)
        assert [generated(output) for output in outputs] == expected, options
        assert crowded.core.metrics.preemptions.total() > 0


def go_on(llm: LLM, sequence: Sequence, count: int) -> list[int]:
    """The next greedy tokens of a sequence outside the queue."""
    core, text = llm.core, []
    while len(text) < count:
        rows = sequence.num_tokens_left
        assert core.states.reserve(sequence, rows)
        logits = core.backend.run(build_step_inputs([ScheduledSequence(sequence, rows)])[0])
        core.states.commit(sequence, rows)
        text.append(int(logits[0].argmax()))
        sequence.token_ids.append(text[-1])
    return text


def test_forked_truncated_and_restored_sequences_write_the_same_text(llm: LLM) -> None:
    core, prompt = llm.core, PROMPTS[3]
    sequence, other, third = (core.make_sequence(None, prompt, GREEDY) for _ in range(3))
    assert core.states.start(sequence)
    text = go_on(llm, sequence, 4)
    snapshot = core.states.snapshot(sequence)
    assert core.states.fork(sequence, other)
    other.token_ids[:] = sequence.token_ids
    text += go_on(llm, sequence, 12)
    assert go_on(llm, other, 12) == text[4:]
    length = len(prompt) + 3
    assert core.states.restore(third, snapshot) and third.num_computed == length
    third.token_ids[:] = [*prompt, *text[:4]]
    for state in core.backend.states.values():
        free = core.states.blocks._free if len(state) == core.scheduler.num_blocks else core.states._free_slots
        state[torch.tensor(free, device=state.device)] = 77
    assert go_on(llm, third, 12) == text[4:]
    core.states.rewind(third)
    third.token_ids[:] = prompt
    assert go_on(llm, third, 16) == text
    core.states.release(snapshot)
    for each in (sequence, other, third):
        core.states.free(each)
    assert_idle(llm)
