from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scheduler_simulation import Boundaries, KeepingCache, Simulation, make_sequence

from qwen4exp_trt.errors import RequestError
from qwen4exp_trt.runtime.hooks import Match, NoPrefixCache
from qwen4exp_trt.runtime.limits import DRAFT_ROWS, EngineLimits
from qwen4exp_trt.runtime.scheduler import AGING_STEPS, Scheduler
from qwen4exp_trt.runtime.sequence import Sequence
from qwen4exp_trt.runtime.sequence_states import SequenceStates
from qwen4exp_trt.runtime.state_pool import StatePool

LIMITS = EngineLimits(max_batch_size=3, max_seq_len=64, prefill_chunk=30, block_size=8)


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
    assert simulation.step() == {"long": 29, "short": 1}
    assert list(simulation.step().items()) == [("short", 1), ("long", 21)]


def test_several_prompts_share_a_step() -> None:
    simulation = Simulation(LIMITS, 24)
    simulation.add(*(make_sequence(name, 12, 1) for name in "abc"))
    assert simulation.step() == {"a": 12, "b": 12, "c": 6}, "5 for each, and the rest in line"
    assert simulation.step() == {"c": 6}


def test_a_long_prompt_does_not_hold_up_short_ones() -> None:
    limits = EngineLimits(max_batch_size=3, max_seq_len=4096, prefill_chunk=100, block_size=8)
    simulation = Simulation(limits, limits.max_num_blocks)
    simulation.add(make_sequence("long", 4000, 2))
    simulation.step()
    simulation.add(make_sequence("short", 20, 1), make_sequence("middle", 60, 1))
    assert simulation.step() == {"long": 68, "short": 16, "middle": 16}, "16 for each, and the rest in line"
    assert simulation.step() == {"long": 80, "short": 4, "middle": 16}
    assert simulation.step() == {"long": 75, "middle": 25}
    assert simulation.step() == {"long": 97, "middle": 3}


def test_budget_of_many_sequences_exceeds_a_small_chunk() -> None:
    limits = EngineLimits(max_batch_size=2, max_seq_len=64, prefill_chunk=4, block_size=8)
    simulation = Simulation(limits, 16)
    simulation.add(make_sequence("a", 10, 1), make_sequence("b", 3, 1))
    assert simulation.step() == {"a": 4, "b": 3}
    assert simulation.step() == {"a": 4}
    assert simulation.step() == {"a": 2}


def test_chunks_end_where_the_prefix_cache_wants_the_states() -> None:
    simulation = Simulation(LIMITS, 24, cache=Boundaries(24))
    simulation.add(make_sequence("a", 50, 1), make_sequence("b", 9, 1))
    assert [simulation.step() for _ in range(4)] == [{"a": 23, "b": 7}, {"a": 1, "b": 2}, {"a": 24}, {"a": 2}]


def test_drafts_follow_the_last_token() -> None:
    simulation = Simulation(LIMITS, 24, num_lookahead=2)
    sequence, other = make_sequence("a", 3, 20), make_sequence("b", 40, 1)
    simulation.add(sequence)
    simulation.step()
    sequence.set_drafts([1, 2, 3])
    simulation.add(other)
    assert simulation.step(num_accepted=2) == {"a": 4, "b": 26}
    assert (sequence.num_computed, len(sequence.token_ids)) == (6, 7)
    sequence.set_drafts(list(range(20)))
    assert simulation.step(num_accepted=7) == {"a": DRAFT_ROWS, "b": 14}
    sequence.set_drafts(list(range(20)))
    assert simulation.step(num_accepted=7) == {"a": 8}
    assert len(sequence.token_ids) == 23 and sequence.finish_reason == "length"


def test_drafts_take_no_page_from_others() -> None:
    simulation = Simulation(LIMITS, 3)
    sequences = [make_sequence("first", 4, 9), make_sequence("last", 4, 9)]
    simulation.add(*sequences)
    assert simulation.step() == {"first": 4, "last": 4}
    for sequence in sequences:
        sequence.set_drafts([1, 2, 3])
    assert simulation.step() == {"first": 4, "last": 4}
    for sequence in sequences:
        sequence.set_drafts([1, 2, 3, 4])
    assert simulation.step() == {"first": 5, "last": 1}, "one page was left"
    assert simulation.num_preemptions == 0


def test_no_more_drafts_than_the_sequence_may_become_long() -> None:
    simulation = Simulation(LIMITS, 1, num_lookahead=2)
    sequence = make_sequence("a", 3, 4)
    simulation.add(sequence)
    simulation.step()
    sequence.set_drafts([1, 2, 3, 4, 5])
    assert simulation.step(num_accepted=2) == {"a": 3}
    assert sequence.finish_reason == "length"


def test_admission_waits_for_a_slot_and_for_the_pages_of_the_prompt() -> None:
    simulation = Simulation(LIMITS, 9)
    simulation.add(make_sequence("big", 30, 2), make_sequence("bigger", 41, 2), make_sequence("small", 1, 1))
    assert set(simulation.step()) == {"big"}, "5 pages are free, 6 are needed, and small does not overtake"
    assert set(simulation.step()) == {"big"}
    assert set(simulation.step()) == {"bigger", "small"}, "big is done"
    simulation.add(*(make_sequence(name, 1, 9) for name in "abc"))
    assert set(simulation.step()) == {"bigger", "a"}, "a page for each is left"
    assert set(simulation.step()) == {"bigger", "a"}
    assert set(simulation.step()) == {"a", "b", "c"}, "3 slots"


def test_no_more_sequences_run_than_asked_for() -> None:
    simulation = Simulation(LIMITS, 24, max_num_seqs=2)
    simulation.add(*(make_sequence(name, 1, 2) for name in "abc"))
    assert [set(step) for step in simulation.run()] == [{"a", "b"}, {"a", "b"}, {"c"}, {"c"}]


def test_the_last_in_line_gives_way_when_pages_run_out_and_is_computed_again() -> None:
    simulation = Simulation(LIMITS, 4)
    first, last = make_sequence("first", 7, 18), make_sequence("last", 7, 18)
    simulation.add(first, last)
    steps = simulation.run()
    assert (simulation.num_preemptions, last.metrics.num_preemptions) == (1, 1)
    assert all("first" in step for step in steps[:18]), "it never waits"
    again = next(index for index in range(1, len(steps)) if steps[index].get("last", 0) > 1)
    assert steps[again]["last"] > 7, "prompt and output at once"
    assert len(last.token_ids) == 7 + 18


def test_a_higher_priority_starts_before_and_takes_slots_and_pages() -> None:
    simulation = Simulation(LIMITS, 8, max_num_seqs=2)
    low = [make_sequence(name, 17, 10, priority=1) for name in ("low 1", "low 2")]
    simulation.add(*low, make_sequence("waits", 1, 1, priority=1))
    assert set(simulation.step()) == {"low 1", "low 2"}
    simulation.add(make_sequence("high", 30, 2))
    assert set(simulation.step()) == {"high", "low 1"}, "the last in line gives its slot"
    simulation.add(make_sequence("higher", 50, 2, priority=-1))
    assert set(simulation.step()) == {"higher"}, "7 of 8 pages"
    simulation.run()
    assert simulation.started == ["low 1", "low 2", "high", "higher", "waits"]
    assert [sequence.metrics.num_preemptions for sequence in low] == [1, 1]


def test_equal_priorities_do_not_take_from_each_other_to_start() -> None:
    simulation = Simulation(LIMITS, 8)
    simulation.add(make_sequence("first", 40, 20))
    simulation.step()
    simulation.add(make_sequence("second", 30, 2))
    while "first" in simulation.step():
        pass
    assert (simulation.num_preemptions, simulation.started) == (0, ["first", "second"])


def test_a_stream_of_higher_priorities_does_not_hold_up_a_lower_one_for_ever() -> None:
    simulation = Simulation(LIMITS, 8, max_num_seqs=1)
    simulation.add(make_sequence("low", 1, 3, priority=1))
    for step in range(AGING_STEPS + 10):
        simulation.add(make_sequence(f"high {step}", 1, 1))
        simulation.step()
    assert "low" in simulation.started
    assert simulation.started.index("low") in range(AGING_STEPS - 10, AGING_STEPS + 2)


class Fickle(NoPrefixCache):
    """Promises a page that it then has not, and keeps one that it could give back."""

    def __init__(self) -> None:
        self.states: SequenceStates | None = None
        self.blocks: list[int] = []

    def match(self, sequence: Sequence) -> Match | None:
        return Match(8, len(self.blocks))

    def evict(self, num_pages: int) -> int:
        assert self.states is not None
        blocks, self.blocks = self.blocks, []
        self.states.blocks.release(blocks)
        return len(blocks)


def test_a_start_with_less_from_the_cache_than_it_promised() -> None:
    cache = Fickle()
    simulation = Simulation(LIMITS, num_blocks=2, cache=cache)
    cache.states = simulation.scheduler.states
    cache.blocks = cache.states.blocks.allocate(1) or []
    simulation.add(make_sequence("a", 9, 4))
    assert simulation.step() == {"a": 9}


@pytest.mark.parametrize("num_rewritten", [0, 1])
def test_a_lone_sequence_runs_though_what_was_restored_for_it_fills_the_pages(num_rewritten: int) -> None:
    """With a page to rewrite it needs one more than there are, unless it lets go of the cached one."""
    cache = KeepingCache()
    simulation = Simulation(LIMITS, 4, cache=cache, num_rewritten=num_rewritten)
    simulation.add(make_sequence("a", 25, 3))
    simulation.run()
    assert len(cache.kept["a"]) == 3
    simulation.add(again := make_sequence("a again", 32 - 3, 3))
    assert simulation.step() == ({"a again": 29} if num_rewritten else {"a again": 5})
    simulation.run()
    assert again.finish_reason == "length" and again.metrics.num_cached_tokens == (0 if num_rewritten else 24)


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
    scheduler = Simulation(LIMITS, 10).scheduler
    held = [make_sequence(name, 30, 1) for name in "ab"]
    assert [scheduler.acquire_memory(sequence) for sequence in held] == [True, True]
    assert not scheduler.acquire_memory(make_sequence("c", 30, 1)), "2 pages are left, 4 are needed"
    assert (scheduler.num_free_blocks, scheduler.num_free_slots) == (2, 1)
    assert scheduler.schedule() == []
    scheduler.finish(held[0])
    assert scheduler.num_free_blocks == 6


def test_request_larger_than_the_pool_is_refused() -> None:
    scheduler = Simulation(LIMITS, 4).scheduler
    scheduler.check_capacity(32)
    with pytest.raises(RequestError, match="may take 33 tokens, 5 pages of the KV cache, but there are 4; lower"):
        scheduler.check_capacity(33)


@dataclass(frozen=True)
class Arrival:
    """A request of a random run."""

    num_prompt: int
    max_tokens: int
    step: int
    priority: int
    lifetime: int | None
    """Steps after which it is cancelled."""


ARRIVALS = st.builds(
    Arrival,
    num_prompt=st.integers(1, 40),
    max_tokens=st.integers(1, 24),
    step=st.integers(0, 12),
    priority=st.integers(-1, 1),
    lifetime=st.none() | st.integers(0, 12),
)


@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=12),
    limits=st.builds(
        EngineLimits,
        max_batch_size=st.integers(1, 4),
        max_seq_len=st.just(64),
        prefill_chunk=st.integers(1, 40),
        block_size=st.sampled_from([4, 8, 64]),
    ),
    extra_blocks=st.integers(0, 20),
    num_lookahead=st.integers(0, 3),
    drafts=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 7)), max_size=20),
    keeps=st.booleans(),
)
def test_every_request_is_served_and_returns_its_memory(
    arrivals: list[Arrival],
    limits: EngineLimits,
    extra_blocks: int,
    num_lookahead: int,
    drafts: list[tuple[int, int]],
    keeps: bool,
) -> None:
    """``drafts``: how many are proposed and accepted in a step. ``keeps``: whether there is a prefix cache."""
    num_blocks = limits.blocks_per_seq + extra_blocks
    cache = KeepingCache() if keeps else NoPrefixCache()
    simulation = Simulation(
        limits, num_blocks, cache=cache, num_lookahead=num_lookahead, num_rewritten=min(num_lookahead, 1)
    )
    sequences = {
        arrival: make_sequence(str(index), arrival.num_prompt, arrival.max_tokens, arrival.priority)
        for index, arrival in enumerate(arrivals)
    }
    for now in range(3000):
        for arrival, sequence in sequences.items():
            if arrival.step == now:
                simulation.add(sequence)
            if arrival.lifetime is not None and arrival.step + arrival.lifetime == now:
                simulation.scheduler.finish(sequence)
        if now > 24 and not simulation.scheduler.num_unfinished:
            break
        proposed, accepted = drafts[now] if now < len(drafts) else (0, 0)
        for sequence in simulation.scheduler.running:
            if sequence.num_tokens_left == 1:
                sequence.set_drafts([0] * proposed)
        simulation.step(accepted)
    for arrival, sequence in sequences.items():
        if arrival.lifetime is None:
            assert len(sequence.token_ids) == arrival.num_prompt + arrival.max_tokens
    assert simulation.scheduler.num_unfinished == 0
    cache.evict(num_blocks)
    assert (simulation.scheduler.num_free_blocks, simulation.scheduler.num_free_slots) == (num_blocks, limits.num_slots)


@given(
    requests=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24), st.integers(0, 8)), min_size=1, max_size=12),
    extra_blocks=st.integers(0, 20),
)
def test_equal_priorities_start_in_the_order_of_arrival(
    requests: list[tuple[int, int, int]], extra_blocks: int
) -> None:
    """Requests of (prompt length, tokens to generate, step of arrival)."""
    simulation = Simulation(LIMITS, LIMITS.blocks_per_seq + extra_blocks)
    arrivals: list[str] = []
    for now in range(9):
        for index, (length, count, step) in enumerate(requests):
            if step == now:
                arrivals.append(str(index))
                simulation.add(make_sequence(str(index), length, count))
        simulation.step()
    simulation.run()
    assert simulation.started == arrivals


def test_tokens_behind_a_step_are_known_ahead() -> None:
    """Of running prompts about a step of them, and of the first in line once."""
    states = SequenceStates(StatePool((), {}), LIMITS, 24)
    scheduler = Scheduler(LIMITS, states, max_num_seqs=2)
    long, short, waiting = make_sequence("long", 50, 4), make_sequence("short", 5, 4), make_sequence("waiting", 40, 4)
    for sequence in (long, short, waiting):
        scheduler.add(sequence)
    scheduled = scheduler.schedule()
    chunks = {entry.sequence: entry.num_tokens for entry in scheduled}
    assert chunks[short] == 5 and 0 < chunks[long] < 50
    upcoming = list(scheduler.upcoming(scheduled))
    assert upcoming[0] == (long, chunks[long], min(50, chunks[long] + LIMITS.prefill_chunk))
    assert [(sequence, start) for sequence, start, _ in upcoming[1:]] == [(waiting, 0)]
    assert sum(stop - start for _, start, stop in upcoming) <= LIMITS.max_step_tokens
    assert [sequence for sequence, *_ in scheduler.upcoming(scheduled)] == [long], "the first in line is there by now"
    scheduler.finish(waiting)
    scheduler.add(waiting)
    assert waiting in [sequence for sequence, *_ in scheduler.upcoming(scheduled)]
