from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen4exp_trt.errors import RequestError
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.sampler import SampledToken
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.scheduler import ScheduledSequence, Scheduler
from qwen4exp_trt.runtime.sequence import Sequence
from qwen4exp_trt.runtime.stopping import StopChecker

LIMITS = EngineLimits(max_batch_size=3, max_seq_len=64, prefill_chunk=30, block_size=8)


def make_sequence(name: str, num_prompt: int, max_tokens: int) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    checker = StopChecker(params, (), num_prompt, num_prompt + max_tokens)
    return Sequence(name, None, list(range(num_prompt)), params, num_prompt + max_tokens, checker, None)


@dataclass
class Simulation:
    """Runs a scheduler without a model and checks at each step what must always hold."""

    limits: EngineLimits
    num_blocks: int
    scheduler: Scheduler = field(init=False)
    started: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits, self.num_blocks)

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)

    def step(self) -> dict[str, int]:
        """Run one step; the number of tokens of each scheduled sequence, in order."""
        scheduled = self.scheduler.schedule()
        self._check(scheduled)
        for entry in scheduled:
            sequence, samples = entry.sequence, entry.samples
            sequence.num_computed += entry.num_tokens
            if samples:
                sequence.append(SampledToken(0, 0.0, 1, None))
            if sequence.finish_reason is not None:
                self.scheduler.finish(sequence)
        return {entry.sequence.request_id: entry.num_tokens for entry in scheduled}

    def _check(self, scheduled: list[ScheduledSequence]) -> None:
        running = list(self.scheduler._running)
        memories = [sequence.memory for sequence in running]
        slots = [memory.slot for memory in memories if memory]
        blocks = [block for memory in memories if memory for block in memory.blocks]
        assert len(slots) == len(running), "every running sequence has memory"
        assert sorted(slots + self.scheduler._free_slots) == list(range(self.limits.num_slots)), (
            "no slot shared or lost"
        )
        assert sorted(blocks + self.scheduler._free_blocks) == list(range(self.num_blocks)), "no page shared or lost"
        for sequence in running:
            assert sequence.memory and len(sequence.memory.blocks) * self.limits.block_size >= sequence.max_len
            if sequence.request_id not in self.started:
                self.started.append(sequence.request_id)
        counts = {entry.sequence: entry.num_tokens for entry in scheduled}
        assert sum(counts.values()) <= self.limits.max_step_tokens
        assert all(0 < count <= self.limits.prefill_chunk for count in counts.values())
        assert len(scheduled) <= self.limits.max_batch_size
        decoding = [sequence for sequence in running if sequence.num_tokens_left == 1]
        prompts = [sequence for sequence in running if sequence.num_tokens_left > 1]
        assert list(counts)[: len(decoding)] == decoding, "all that decode run, before all prompts"
        assert list(counts)[len(decoding) :] == prompts[: len(counts) - len(decoding)], "prompts in their order"
        assert not prompts or prompts[0] in counts, "the first prompt gets on"


def test_prompt_is_cut_into_chunks_beside_a_decoding_sequence() -> None:
    simulation = Simulation(LIMITS, 24)
    simulation.add(make_sequence("a", 3, 9))
    assert simulation.step() == {"a": 3}
    simulation.add(make_sequence("b", 50, 2))
    assert simulation.step() == {"a": 1, "b": 29}, "the budget of 30 is shared"
    assert simulation.step() == {"a": 1, "b": 21}
    assert simulation.step() == {"a": 1, "b": 1}
    assert simulation.step() == {"a": 1}, "b has its two tokens"


def test_decoding_sequences_go_first_whatever_their_age() -> None:
    simulation = Simulation(LIMITS, 24)
    simulation.add(make_sequence("long", 50, 2), make_sequence("short", 1, 5))
    assert simulation.step() == {"short": 1, "long": 29}
    assert simulation.step() == {"short": 1, "long": 21}


def test_several_prompts_share_a_step() -> None:
    simulation = Simulation(LIMITS, 24)
    simulation.add(*(make_sequence(name, 12, 1) for name in "abc"))
    assert simulation.step() == {"a": 12, "b": 12, "c": 6}
    assert simulation.step() == {"c": 6}


def test_budget_of_many_sequences_exceeds_a_small_chunk() -> None:
    limits = EngineLimits(max_batch_size=2, max_seq_len=64, prefill_chunk=4, block_size=8)
    simulation = Simulation(limits, 16)
    simulation.add(make_sequence("a", 10, 1), make_sequence("b", 3, 1))
    assert simulation.step() == {"a": 4, "b": 3}
    assert simulation.step() == {"a": 4}
    assert simulation.step() == {"a": 2}


def test_admission_waits_for_a_slot_and_for_pages() -> None:
    simulation = Simulation(LIMITS, 9)
    simulation.add(make_sequence("big", 30, 2), make_sequence("bigger", 30, 15), make_sequence("small", 1, 1))
    assert set(simulation.step()) == {"big"}, "6 more pages are not free, and small does not overtake"
    assert set(simulation.step()) == {"big"}
    assert set(simulation.step()) == {"bigger", "small"}, "big is done"
    simulation.add(*(make_sequence(name, 1, 9) for name in "abc"))
    assert set(simulation.step()) == {"bigger", "a"}, "2 of the 3 pages that bigger leaves"


def test_finish_takes_a_waiting_sequence_out_and_is_harmless_twice() -> None:
    simulation = Simulation(LIMITS, 8)
    first, second, third = (make_sequence(name, 60, 1) for name in "abc")
    simulation.add(first, second, third)
    simulation.step()
    for _ in range(2):
        simulation.scheduler.finish(second)
        simulation.scheduler.finish(first)
    assert (simulation.scheduler.num_free_blocks, simulation.scheduler.num_free_slots) == (8, 3)
    assert set(simulation.step()) == {"c"}
    assert simulation.scheduler.num_unfinished == 1


def test_memory_can_be_held_outside_the_queue() -> None:
    scheduler = Scheduler(LIMITS, 10)
    held = [make_sequence(name, 30, 1) for name in "ab"]
    assert [scheduler.acquire_memory(sequence) for sequence in held] == [True, True]
    assert not scheduler.acquire_memory(make_sequence("c", 30, 1)), "2 pages are left, 4 are needed"
    assert scheduler.num_free_blocks == 2
    assert scheduler.schedule() == []
    scheduler.finish(held[0])
    assert scheduler.num_free_blocks == 6


def test_request_larger_than_the_pool_is_refused() -> None:
    scheduler = Scheduler(LIMITS, 4)
    scheduler.check_capacity(32)
    with pytest.raises(RequestError, match="may take 33 tokens, 5 pages of the KV cache, but there are 4; lower"):
        scheduler.check_capacity(33)


@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 8)), min_size=1, max_size=12),
    limits=st.builds(
        EngineLimits,
        max_batch_size=st.integers(1, 4),
        max_seq_len=st.just(64),
        prefill_chunk=st.integers(1, 40),
        block_size=st.sampled_from([4, 8, 64]),
    ),
    extra_blocks=st.integers(0, 20),
)
def test_every_request_is_served_in_order_and_returns_its_memory(
    requests: list[tuple[int, int, int]], limits: EngineLimits, extra_blocks: int
) -> None:
    """Requests of (prompt length, tokens to generate, step of arrival)."""
    num_blocks = limits.blocks_per_seq + extra_blocks
    simulation = Simulation(limits, num_blocks)
    sequences = {str(i): make_sequence(str(i), length, count) for i, (length, count, _) in enumerate(requests)}
    arrivals: list[str] = []
    for now in range(1000):
        new = [name for name in sequences if requests[int(name)][2] == now]
        arrivals += new
        simulation.add(*(sequences[name] for name in new))
        if len(arrivals) == len(sequences) and not simulation.scheduler.num_unfinished:
            break
        simulation.step()
    assert simulation.started == arrivals, "first come, first served"
    for name, (length, count, _) in enumerate(requests):
        assert len(sequences[str(name)].token_ids) == length + count
    assert simulation.scheduler.num_free_blocks == num_blocks
    assert simulation.scheduler.num_free_slots == limits.num_slots
