"""A scheduler without a model: sequences, prefix caches, and what must hold at each step."""

from __future__ import annotations

from dataclasses import dataclass, field

from qwen4exp_trt.runtime.hooks import Match, NoPrefixCache
from qwen4exp_trt.runtime.limits import DRAFT_ROWS, EngineLimits
from qwen4exp_trt.runtime.sampler import SampledToken
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.scheduler import ScheduledSequence, Scheduler
from qwen4exp_trt.runtime.sequence import Sequence
from qwen4exp_trt.runtime.sequence_states import SequenceStates
from qwen4exp_trt.runtime.state_pool import StatePool
from qwen4exp_trt.runtime.stopping import StopChecker


def make_sequence(name: str, num_prompt: int, max_tokens: int, priority: int = 0) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    checker = StopChecker(params, (), num_prompt, num_prompt + max_tokens)
    prompt = list(range(num_prompt))
    return Sequence(name, None, prompt, params, num_prompt + max_tokens, checker, None, priority=priority)


class Boundaries(NoPrefixCache):
    """Wants the states at multiples of ``interval``."""

    def __init__(self, interval: int) -> None:
        self.interval = interval

    def next_boundary(self, sequence: Sequence) -> int | None:
        return (sequence.num_computed // self.interval + 1) * self.interval


class KeepingCache(NoPrefixCache):
    """Keeps the pages of every sequence up to its last boundary, for those with the same number in their names."""

    def __init__(self) -> None:
        self.states: SequenceStates
        self.kept: dict[str, list[int]] = {}

    def match(self, sequence: Sequence) -> Match | None:
        length = self._length(sequence)
        return Match(length, length // self.states.block_size) if length else None

    def restore(self, sequence: Sequence) -> int:
        length = self._length(sequence)
        if length:
            blocks = self.kept[sequence.request_id[0]][: length // self.states.block_size]
            self.states.blocks.share(blocks)
            self.states.restore_pages(sequence, blocks, {}, range(length, length + 1))
        return length

    def after_step(self, sequence: Sequence) -> None:
        name, count = sequence.request_id[0], sequence.num_computed // self.states.block_size
        if sequence.memory is not None and count > len(self.kept.get(name, [])):
            blocks = sequence.memory.blocks[:count]
            self.states.blocks.share(blocks)
            self.states.blocks.release(self.kept.get(name, []))
            self.kept[name] = blocks

    def evict(self, num_pages: int) -> int:
        freed = 0
        for name in list(self.kept):
            while freed < num_pages and self.kept[name] and not self.states.blocks.is_shared(self.kept[name][-1]):
                self.states.blocks.release([self.kept[name].pop()])
                freed += 1
        return freed

    def _length(self, sequence: Sequence) -> int:
        """At least one token is left."""
        kept = len(self.kept.get(sequence.request_id[0], [])) * self.states.block_size
        longest = (len(sequence.token_ids) - 1) // self.states.block_size * self.states.block_size
        return min(kept, longest)


@dataclass
class Simulation:
    """Runs a scheduler without a model and checks at each step what must always hold."""

    limits: EngineLimits
    num_blocks: int
    max_num_seqs: int | None = None
    cache: NoPrefixCache = field(default_factory=NoPrefixCache)
    num_lookahead: int = 0
    num_rewritten: int = 0
    scheduler: Scheduler = field(init=False)
    started: list[str] = field(default_factory=list)
    """Names in the order of their first steps."""

    def __post_init__(self) -> None:
        states = SequenceStates(StatePool((), {}), self.limits, self.num_blocks, self.num_rewritten)
        if isinstance(self.cache, KeepingCache):
            self.cache.states = states
        self.scheduler = Scheduler(self.limits, states, self.max_num_seqs, self.cache, self.num_lookahead)

    @property
    def num_preemptions(self) -> float:
        return self.scheduler.metrics.preemptions.total()

    def add(self, *sequences: Sequence) -> None:
        for sequence in sequences:
            self.scheduler.add(sequence)

    def step(self, num_accepted: int = 0) -> dict[str, int]:
        """Run one step; the number of tokens of each scheduled sequence, in order."""
        scheduled = self.scheduler.schedule()
        self._check(scheduled)
        for entry in scheduled:
            sequence, samples = entry.sequence, entry.samples
            accepted = min(num_accepted, entry.num_drafts)
            self.scheduler.states.commit(sequence, entry.num_tokens, entry.num_tokens - entry.num_drafts + accepted)
            sequence.set_drafts(())
            for _ in range(accepted + 1 if samples else 0):
                if sequence.finish_reason is None:
                    sequence.append(SampledToken(0, 0.0, 1, None))
            self.cache.after_step(sequence)
            if sequence.finish_reason is not None:
                self.scheduler.finish(sequence)
        return {entry.sequence.request_id: entry.num_tokens for entry in scheduled}

    def run(self, num_steps: int = 2000) -> list[dict[str, int]]:
        """All steps until nothing is left."""
        steps = []
        while self.scheduler.num_unfinished:
            steps.append(self.step())
            assert len(steps) < num_steps, "somebody waits for ever"
        return steps

    def _check(self, scheduled: list[ScheduledSequence]) -> None:
        scheduler, blocks = self.scheduler, self.scheduler.states.blocks
        running, waiting = scheduler.running, scheduler._waiting
        memories = [sequence.memory for sequence in running if sequence.memory]
        assert len(memories) == len(running) <= scheduler.max_num_seqs, "every running sequence has memory"
        assert all(sequence.memory is None for sequence in waiting), "a waiting one has none"
        assert [sequence.place_in_line for sequence in running] == sorted(s.place_in_line for s in running)
        slots = [memory.slot for memory in memories]
        assert sorted(slots + scheduler.states._free_slots) == list(range(self.limits.num_slots)), "no slot lost"
        held = [block for memory in memories for block in memory.blocks]
        if isinstance(self.cache, KeepingCache):
            held += [block for kept in self.cache.kept.values() for block in kept]
        assert [held.count(block) for block in range(self.num_blocks)] == blocks._references, "no page lost"
        for entry in scheduled:
            first = entry.start // self.limits.block_size
            assert entry.sequence.memory is not None
            assert not any(map(blocks.is_shared, entry.sequence.memory.blocks[first:])), "what is written is its own"
        counts = {entry.sequence: entry.num_tokens for entry in scheduled}
        assert sum(counts.values()) <= self.limits.max_step_tokens
        for entry in scheduled:
            sequence = entry.sequence
            assert sequence in running and sequence.memory is not None
            assert 0 < entry.num_tokens <= max(self.limits.prefill_chunk, DRAFT_ROWS)
            assert len(sequence.memory.blocks) * self.limits.block_size >= entry.start + entry.num_tokens
            if sequence.request_id not in self.started:
                self.started.append(sequence.request_id)
        decoding = [sequence for sequence in running if sequence.num_tokens_left == 1]
        assert all(sequence in counts for sequence in decoding), "all that decode get a token"
        assert not scheduler.num_unfinished or counts, "something is done"
        assert not running or running[0] in counts, "the first in line gets on"
