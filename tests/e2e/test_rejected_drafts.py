"""Drafts through the whole program: rows that are not accepted leave nothing behind."""

from __future__ import annotations

import pytest
import torch
from hf_parity import SELF_BOUND, Pair, Stepper, random_prompt, relative_error

from qwen4exp_trt.frontend.states import RINGS
from qwen4exp_trt.runtime.limits import DRAFT_ROWS
from qwen4exp_trt.runtime.specs import StateKind

PROMPT = random_prompt(64, seed=5, eos=(6, 20, 37))


@pytest.mark.parametrize("prompt_len", [1, 19, 30])
@pytest.mark.parametrize("length", [2, 5, DRAFT_ROWS])
def test_every_accepted_count_equals_plain_decoding(tiny: Pair, prompt_len: int, length: int) -> None:
    """Wrong ids behind the accepted ones, across groups, pages, the budget and the n-gram's reset."""
    expected = tiny.llm.score(PROMPT)
    for accepted in range(1, length + 1):
        stepper = Stepper(tiny.core(), PROMPT)
        logits = [stepper.run(prompt_len)]
        for kept in (accepted, length + 1 - accepted):
            logits.append(run_draft(stepper, length, kept))
        logits += [stepper.run(1), stepper.run(3)]
        done = stepper.sequence.num_computed
        logits.append(stepper.run(len(PROMPT) - done))
        stepper.finish()
        assert relative_error(expected, torch.cat(logits)) <= SELF_BOUND, accepted


def run_draft(stepper: Stepper, length: int, kept: int) -> torch.Tensor:
    """Logits of the ``kept`` rows of a step of ``length``, the others of which have wrong ids and are taken back."""
    sequence = stepper.sequence
    right, start = list(sequence.token_ids), sequence.num_computed
    for index in range(start + kept, start + length):
        sequence.token_ids[index] = (right[index] + 7) % 96
    logits = stepper.run(length)[:kept]
    sequence.token_ids[:] = right
    sequence.num_computed = start + kept
    return logits


def test_states_equal_those_of_plain_decoding(tiny: Pair) -> None:
    """The next token leaves what plain decoding leaves: bits of ids and positions, close values of everything else."""
    context = 21
    states = []
    for kept in (1, 3, None):
        stepper = Stepper(tiny.core(), PROMPT)
        if kept is None:
            for _ in range(context):
                stepper.run(1)
        else:
            stepper.run(context - 1 - kept)
            run_draft(stepper, DRAFT_ROWS, kept)
            stepper.run(1)
        assert stepper.sequence.memory is not None
        states.append(states_of(tiny, stepper.sequence.memory.slot, context))
        stepper.finish()
    *drafted, plain = states
    for values in drafted:
        assert values.keys() == plain.keys()
        for name, value in values.items():
            if value.is_floating_point():
                assert relative_error(plain[name], value) <= SELF_BOUND, name
            else:
                assert torch.equal(plain[name], value), name


def states_of(pair: Pair, slot: int, context: int) -> dict[str, torch.Tensor]:
    """What the per-sequence states say about the tokens before ``context``."""
    states = {}
    for spec in pair.backend.program.states:
        state = pair.backend.states[spec.name]
        if spec.kind in RINGS:
            rows = state.shape[1] - DRAFT_ROWS
            states[spec.name] = state[slot, torch.arange(context - rows, context) % state.shape[1]].clone()
        elif spec.kind is StateKind.RECURRENT_STATE:
            states[spec.name] = state[slot].clone()
    return states
