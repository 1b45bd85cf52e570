"""The known traps about histories, pages, batches and positions, one test each, by the number in the list of traps."""

from __future__ import annotations

import copy

import pytest
import torch
from hf_parity import (
    EOS,
    REFERENCE_BOUND,
    SMALL,
    VISIBLE,
    Pair,
    PairFactory,
    Stepper,
    assert_logits_equal,
    generate_greedy,
    random_prompt,
    reference_logits,
    reference_modules,
    relative_error,
)
from model_zoo import tiny_config_dict
from torch import Tensor

from qwen4exp_trt.runtime.specs import StateKind
from qwen4exp_trt.runtime.state_pool import allocate_states
from qwen4exp_trt.runtime.step_inputs import build_step_inputs

PROMPT = random_prompt(61, seed=9, eos=(0, 12, 13, 40))


@pytest.mark.parametrize("cut", [5, 20])
def test_trap_05_ngram_history_survives_a_pause(tiny: Pair, cut: int) -> None:
    """A history that is reset to eos when a sequence goes on is visible in the next tokens."""
    expected = tiny.check(PROMPT)
    stepper = Stepper(tiny.core(), PROMPT)
    stepper.run(cut)
    kept = {name: state.clone() for name, state in tiny.backend.states.items()}
    assert_logits_equal(expected[cut:], stepper.run(len(PROMPT) - cut), REFERENCE_BOUND)
    for name, state in tiny.backend.states.items():
        state.copy_(kept[name])
    tiny.state(StateKind.NGRAM_IDS).fill_(EOS)
    stepper.sequence.num_computed = cut
    assert relative_error(expected[cut:], stepper.run(len(PROMPT) - cut)) > VISIBLE


def test_trap_06_decode_hashes_the_accepted_tokens(tiny: Pair) -> None:
    """The two-token history of a decode step is what was sampled, not a placeholder."""
    prompt = PROMPT[:20]
    core = tiny.core()
    tokens, _ = generate_greedy(core, [prompt], 6)[0]
    expected = tiny.check(prompt + tokens)
    stepper = Stepper(core, prompt + tokens)
    stepper.run(len(prompt))
    ids = tiny.state(StateKind.NGRAM_IDS)
    kept: dict[str, torch.Tensor] = {}
    for t in range(len(prompt), len(prompt) + len(tokens)):
        kept = {name: state.clone() for name, state in tiny.backend.states.items()}
        assert_logits_equal(expected[t : t + 1], stepper.run(1), REFERENCE_BOUND)
        history = ids[stepper.sequence.memory.slot, torch.tensor([t - 1, t]) % ids.shape[1]]
        assert history.tolist() == (prompt + tokens)[t - 1 : t + 1]
    for name, state in tiny.backend.states.items():
        state.copy_(kept[name])
    ids.fill_(-1)
    stepper.sequence.num_computed -= 1
    assert relative_error(expected[-1:], stepper.run(1)) > VISIBLE


def test_trap_20_later_pages_and_unused_selections_read_nothing(tiny: Pair) -> None:
    """Decode past the first page, with few groups selected and NaN in every page that is not the sequence's own."""
    prompt, page = random_prompt(3, seed=20), tiny.llm.manifest.limits.block_size
    for state in tiny.backend.states.values():
        state.fill_(torch.nan if state.is_floating_point() else -1)
    tokens, logprobs = generate_greedy(tiny.core(), [prompt], 2 * page)[0]
    assert logprobs.isfinite().all()
    expected = reference_logits(tiny.reference, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
    assert_logits_equal(expected, logprobs, REFERENCE_BOUND)


@pytest.mark.parametrize("max_seq_len,prefill_chunk,max_batch_size", [(70, 70, 9), (131, 9, 2)])
def test_trap_21_every_buffer_follows_the_limits(
    make: PairFactory, max_seq_len: int, prefill_chunk: int, max_batch_size: int
) -> None:
    """A prompt of exactly the longest length, in chunks as large as allowed, fits and is right."""
    limits = {"max_seq_len": max_seq_len, "prefill_chunk": prefill_chunk, "max_batch_size": max_batch_size}
    pair = make(tiny_config_dict(**SMALL), **limits)
    pages = max_batch_size * -(-max_seq_len // 24)
    expected = allocate_states(pair.backend.program.states, pages, max_batch_size)
    assert {name: state.shape for name, state in pair.backend.states.items()} == {
        name: state.shape for name, state in expected.items()
    }
    pair.check(random_prompt(max_seq_len, seed=21))
    prompts = [random_prompt(max_seq_len - 2, seed=i) for i in range(max_batch_size)]
    assert [len(tokens) for tokens, _ in generate_greedy(pair.core(), prompts, 2)] == [2] * max_batch_size


def test_trap_26_rows_of_a_batch_belong_to_their_own_sequence(tiny: Pair) -> None:
    prompts = [random_prompt(30, seed=seed) for seed in (26, 27)]
    expected = torch.stack([tiny.check(prompt)[-1] for prompt in prompts])

    def last_logits(swaps_slots: bool) -> Tensor:
        """The last tokens of both prompts in one step, after each prompt's others in a step of its own."""
        core = tiny.core()
        steppers = [Stepper(core, prompt) for prompt in prompts]
        for stepper in steppers:
            stepper.run(29)
        inputs, _ = build_step_inputs([stepper.next_entry(1) for stepper in steppers])
        if swaps_slots:
            inputs["slot_ids"] = inputs["slot_ids"].flip(0)
        return tiny.backend.run(inputs)

    assert_logits_equal(expected, last_logits(swaps_slots=False), REFERENCE_BOUND)
    assert relative_error(expected, last_logits(swaps_slots=True)) > VISIBLE


def image_positions(length: int) -> Tensor:
    """``[3, length]``: text, a 3 x 4 image from token 6 on, and text after it."""
    positions = torch.arange(length).repeat(3, 1)
    positions[:, 6:18] = 6
    positions[1, 6:18] += torch.arange(12) // 4
    positions[2, 6:18] += torch.arange(12) % 4
    positions[:, 18:] = torch.arange(length - 18) + 10
    return positions


def score_at(pair: Pair, token_ids: list[int], positions: Tensor, cut: int) -> Tensor:
    """Logits of a prompt with given MRoPE positions, in two steps."""
    stepper, rows = Stepper(pair.core(), token_ids), []
    for part in (slice(0, cut), slice(cut, len(token_ids))):
        entry = stepper.next_entry(part.stop - part.start)
        inputs = build_step_inputs([entry], all_rows=True)[0] | {"positions": positions[:, part].int()}
        rows.append(pair.backend.run(inputs))
        stepper.sequence.num_computed = part.stop
    return torch.cat(rows)


@pytest.mark.parametrize("cut", [5, 8, 11, 30])
def test_trap_27_groups_follow_token_order_and_rotate_in_three_axes(make: PairFactory, cut: int) -> None:
    """Image tokens share a temporal position; groups still count tokens, and take their first token's position."""
    pair, prompt = make(tiny_config_dict(**SMALL)), random_prompt(40, seed=27)
    positions = image_positions(40)
    expected = reference_logits(pair.reference, prompt, positions)
    assert_logits_equal(expected, score_at(pair, prompt, positions, cut), REFERENCE_BOUND)
    for wrong in (positions[:1].repeat(3, 1), torch.arange(40).repeat(3, 1)):
        assert relative_error(expected, score_at(pair, prompt, wrong, cut)) > VISIBLE

    broken = copy.deepcopy(pair.reference)
    (indexer,) = reference_modules(broken, "QSAIndexer")
    select, time_only = indexer.forward, broken.model.rotary_emb(torch.zeros(1), positions[:1, None].repeat(3, 1, 1))
    indexer.forward = lambda x, _, mask, cache: select(x, time_only, mask, cache)
    assert relative_error(expected, reference_logits(broken, prompt, positions)) > VISIBLE
