from __future__ import annotations

import pytest
import torch

from qwen4exp_trt.runtime.limits import DRAFT_ROWS, EngineLimits
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.sequence import Sequence
from qwen4exp_trt.runtime.sequence_memory import Memory
from qwen4exp_trt.runtime.sequence_states import SequenceStates
from qwen4exp_trt.runtime.specs import NUM_BLOCKS, NUM_SLOTS, StateKind, StateSpec
from qwen4exp_trt.runtime.state_pool import StatePool, allocate_states
from qwen4exp_trt.runtime.stopping import StopChecker

LIMITS = EngineLimits(max_batch_size=3, max_seq_len=64, prefill_chunk=30, block_size=4)
BLOCKS = 10
SPECS = (
    StateSpec("kv", StateKind.KV_CACHE, 0, (NUM_BLOCKS, 4), "int32"),
    StateSpec("ring", StateKind.CONV_STATE, 0, (NUM_SLOTS, 2), "int32"),
)


def make_states(num_rewritten: int = 0) -> SequenceStates:
    """Every page and slot holds its own number."""
    tensors = allocate_states(SPECS, BLOCKS, LIMITS.num_slots)
    for tensor in tensors.values():
        tensor.copy_(torch.arange(len(tensor)).unsqueeze(1).expand_as(tensor))
    return SequenceStates(StatePool(SPECS, tensors), LIMITS, BLOCKS, num_rewritten)


def make_sequence() -> Sequence:
    params = SamplingParams()
    return Sequence("0", None, [1] * 40, params, 64, StopChecker(params, (), 40, 64), None)


def started(states: SequenceStates, *steps: int) -> Sequence:
    """A sequence that has run steps of so many tokens."""
    sequence = make_sequence()
    assert states.start(sequence)
    for count in steps:
        assert states.reserve(sequence, count)
        states.commit(sequence, count)
    return sequence


def memory_of(sequence: Sequence) -> Memory:
    assert sequence.memory is not None
    return sequence.memory


def window_of(sequence: Sequence) -> range:
    return memory_of(sequence).window


def test_pages_grow_with_a_sequence() -> None:
    states = make_states()
    sequence = started(states, 3)
    assert memory_of(sequence).blocks == [0]
    assert states.reserve(sequence, 1) and memory_of(sequence).blocks == [0]
    assert states.num_missing(sequence, 10) == 3 and states.reserve(sequence, 10)
    assert memory_of(sequence).blocks == memory_of(sequence).block_row(5).tolist()[:4] == [0, 1, 2, 3]
    assert states.num_missing(sequence, 38) == 7 and not states.reserve(sequence, 38)
    assert memory_of(sequence).blocks == [0, 1, 2, 3] and states.blocks.num_free == 6


@pytest.mark.parametrize(
    ("steps", "window"),
    [((1,), range(1, 2)), ((5, DRAFT_ROWS), range(6, 14)), ((20,), range(20, 21)), ((20, 1), range(21, 22))],
)
def test_what_can_be_taken_back_is_what_the_last_step_ran(steps: tuple[int, ...], window: range) -> None:
    states = make_states()
    sequence = started(states, *steps)
    assert window_of(sequence) == window
    states.free(sequence)
    for length in range(1, window.stop):
        other = started(states, *steps)
        assert states.truncate(other, length) == (length in window)
        assert other.num_computed == (length if length in window else window.stop - 1)
        states.free(other)
    other = started(states, *steps)
    assert states.truncate(other, 0) and memory_of(other).blocks == []


def test_rejected_drafts_are_not_in_the_window() -> None:
    states = make_states()
    sequence = started(states, 9)
    assert states.reserve(sequence, 5)
    states.commit(sequence, 5, 2)
    assert (sequence.num_computed, window_of(sequence)) == (11, range(10, 12))
    with pytest.raises(AssertionError, match="taken back as far as"):
        states.commit(sequence, 20, 3)


def test_forks_share_pages_until_one_writes() -> None:
    states = make_states()
    source, target = started(states, 10), make_sequence()
    assert states.fork(source, target)
    assert memory_of(target).blocks == memory_of(source).blocks == [0, 1, 2]
    assert target.num_computed == 10 and window_of(target) == window_of(source)
    assert states.pool["ring"][1].tolist() == [0, 0], "the slot is a copy"
    assert states.reserve(target, 1) and memory_of(target).blocks == [0, 1, 3]
    assert states.pool["kv"][3].tolist() == [2] * 4
    assert states.reserve(source, 3) and memory_of(source).blocks == [0, 1, 2, 4], "nobody else has page 2"
    states.free(source)
    assert states.blocks.num_free == BLOCKS - 3
    states.free(target)
    assert (states.blocks.num_free, states.num_free_slots) == (BLOCKS, 3)


def test_a_fork_needs_a_slot() -> None:
    states = make_states()
    source, target = started(states, 10), make_sequence()
    others = [started(states), started(states)]
    assert not states.fork(source, target) and target.memory is None
    states.free(others[0])
    assert states.fork(source, target)


def test_a_snapshot_outlives_its_sequence() -> None:
    states = make_states()
    sequence = started(states, 5, 6)
    snapshot = states.snapshot(sequence, 8)
    assert (snapshot.length, snapshot.window, snapshot.blocks) == (8, range(6, 9), (0, 1))
    states.free(sequence)
    assert states.blocks.num_free == BLOCKS - 2
    other = started(states, 30)
    states.pool["ring"][memory_of(other).slot] = 99
    assert states.restore(other, snapshot)
    assert (other.num_computed, memory_of(other).blocks, window_of(other)) == (8, [0, 1], range(6, 9))
    assert states.pool["ring"][memory_of(other).slot].tolist() == [0, 0]
    assert states.truncate(other, 7) and states.reserve(other, 1)
    assert memory_of(other).blocks == [0, 2], "the snapshot keeps its page"
    states.release(snapshot)
    states.free(other)
    assert states.blocks.num_free == BLOCKS


@pytest.mark.parametrize("length", [0, 4, 5, 12])
def test_no_snapshot_of_other_lengths(length: int) -> None:
    states = make_states()
    sequence = started(states, 5, 6)
    with pytest.raises(ValueError, match=f"a snapshot of {length} tokens of a sequence whose states are those of"):
        states.snapshot(sequence, length)
    assert states.blocks.num_free == BLOCKS - 3


def test_restoring_needs_a_slot() -> None:
    states = make_states()
    snapshot = states.snapshot(started(states, 5))
    others = [started(states), started(states)]
    fresh = make_sequence()
    assert not states.restore(fresh, snapshot) and fresh.memory is None
    states.free(others[0])
    assert states.restore(fresh, snapshot) and fresh.num_computed == 5


def test_a_page_that_a_draft_head_rewrites_is_copied() -> None:
    """At a boundary of pages, once; then its rows are done."""
    states = make_states(num_rewritten=1)
    snapshot = states.snapshot(started(states, 8))
    sequence = make_sequence()
    assert states.restore(sequence, snapshot)
    assert states.num_missing(sequence, 1) == 2
    assert states.reserve(sequence, 1) and memory_of(sequence).blocks == [0, 2, 3]
    states.commit(sequence, 1)
    assert states.truncate(sequence, 8) is False
    kept = states.snapshot(sequence)
    states.commit(sequence, 3)
    assert states.num_missing(sequence, 1) == 1, "row 11 is done, its page is shared"
    states.release(kept)
