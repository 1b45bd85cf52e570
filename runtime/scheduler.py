"""Decides which sequences run how many tokens in the next step, and who gives way when memory runs out."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from operator import attrgetter

from qwen4exp_trt.errors import RequestError
from qwen4exp_trt.runtime.hooks import NoPrefixCache, PrefixCache
from qwen4exp_trt.runtime.limits import DRAFT_ROWS, EngineLimits
from qwen4exp_trt.runtime.metrics import EngineMetrics
from qwen4exp_trt.runtime.sequence import Sequence
from qwen4exp_trt.runtime.sequence_states import SequenceStates

AGING_STEPS = 1000
"""Steps by which a request has to be earlier than one of the next higher priority to be served before it."""

_PLACE = attrgetter("place_in_line")


@dataclass(slots=True)  # not frozen: there is one a sequence and step
class ScheduledSequence:
    """A sequence and how many of its tokens the step runs: some that it has, and behind its last one some drafts."""

    sequence: Sequence
    num_tokens: int
    num_drafts: int = 0
    """Of the tokens."""
    start: int = field(init=False)
    """The position of the first."""
    samples: bool = field(init=False)
    """True when the step runs the sequence's last token, so that the next one can be sampled."""

    def __post_init__(self) -> None:
        self.start = self.sequence.num_computed
        self.samples = self.start + self.num_tokens - self.num_drafts == len(self.sequence.token_ids)

    @property
    def num_logits_rows(self) -> int:
        """Rows whose logits the step gives: of the sequence's last token and of its drafts."""
        return self.num_drafts + 1 if self.samples else 0

    @property
    def num_prompt_tokens(self) -> int:
        """How many of the tokens are the prompt's."""
        left = len(self.sequence.prompt_token_ids) - self.start
        return 0 if left <= 0 else min(left, self.num_tokens)


class Scheduler:
    """Serves sequences in line: by priority, in order of arrival within one, and nobody waits for ever.

    The place in line is fixed when a sequence is added: the step of its arrival, later by `AGING_STEPS` for each level
    of its priority (the lowest runs first). The first ``max_num_seqs`` in line run, as far as there are pages; one that
    has started gives way only to a sequence before it: for pages that this one needs to go on, or to start if its
    priority is higher. What gives way loses its memory and is computed again when its turn comes.

    A step takes the next token of every sequence that decodes, with its drafts. What its token budget leaves goes to
    prompts, half in equal shares and the rest in the order of the line.
    """

    def __init__(
        self,
        limits: EngineLimits,
        states: SequenceStates,
        max_num_seqs: int | None = None,
        prefix_cache: PrefixCache | None = None,
        num_lookahead: int = 0,
        metrics: EngineMetrics | None = None,
    ) -> None:
        self.limits, self.states, self.num_lookahead = limits, states, num_lookahead
        self.metrics = metrics or EngineMetrics()
        self.max_num_seqs = limits.max_batch_size if max_num_seqs is None else max_num_seqs
        self.prefix_cache = prefix_cache or NoPrefixCache()
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._entries: dict[Sequence, ScheduledSequence] = {}
        """Of the step that is being made up."""
        self._looked_ahead: Sequence | None = None
        """The last waiting sequence that `upcoming` gave."""
        self._num_steps = self._num_added = self._num_freed = 0
        self._refused: tuple[Sequence, int, int] | None = None
        """Who was refused memory last, and at which state of it."""

    @property
    def num_unfinished(self) -> int:
        return len(self._waiting) + len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running(self) -> list[Sequence]:
        """The sequences that have started, in line."""
        return list(self._running)

    @property
    def num_blocks(self) -> int:
        return self.states.blocks.num_blocks

    @property
    def num_free_slots(self) -> int:
        return self.states.num_free_slots

    @property
    def num_free_blocks(self) -> int:
        return self.states.blocks.num_free

    def check_capacity(self, max_len: int) -> None:
        """`RequestError` if a sequence of ``max_len`` tokens could never run to its end."""
        num_blocks = self.states.num_pages(max_len)
        if num_blocks > self.num_blocks:
            raise RequestError(
                f"the request may take {max_len} tokens, {num_blocks} pages of the KV cache, but there are "
                f"{self.num_blocks}; lower max_tokens or give the cache more pages"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that passes `check_capacity`."""
        self._num_added += 1
        arrival = self._num_steps + sequence.priority * AGING_STEPS
        sequence.place_in_line = (arrival, sequence.priority, self._num_added)
        insort(self._waiting, sequence, key=_PLACE)

    def schedule(self) -> list[ScheduledSequence]:
        """The sequences of the next step: those that decode first, then prompts, up to the step's token budget."""
        self._num_steps += 1
        self._entries = {}
        for sequence in self.running:
            if sequence.memory is not None and sequence.num_tokens_left == 1:
                self._schedule_decoding(sequence)
        self._admit()
        self._schedule_prompts()
        return list(self._entries.values())

    def upcoming(self, scheduled: SequenceOf[ScheduledSequence]) -> Iterator[tuple[Sequence, int, int]]:
        """Known tokens that come behind the step ``scheduled``: of which sequence, from where to where.

        About a step of them: of the running prompts, and of the first in line once it is there.
        """
        behind = {entry.sequence: entry.start + entry.num_tokens for entry in scheduled}
        starts = [(sequence, behind.get(sequence, sequence.num_computed)) for sequence in self._running]
        if self._waiting and self._waiting[0] is not self._looked_ahead:
            self._looked_ahead = self._waiting[0]
            starts.append((self._looked_ahead, 0))
        budget = self.limits.max_step_tokens
        for sequence, start in starts:
            stop = min(len(sequence.token_ids), start + min(budget, self.limits.prefill_chunk))
            if start < stop:
                budget -= stop - start
                yield sequence, start, stop

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its memory."""
        for queue in (self._running, self._waiting):
            _take_out(queue, sequence)
        if sequence is self._looked_ahead:
            self._looked_ahead = None
        self._num_freed += 1
        self._free(sequence)

    def acquire_memory(self, sequence: Sequence) -> bool:
        """Give a sequence that is in no queue a slot and pages for its longest possible length, until `finish`.

        False if too few are free; no other sequence gives way.
        """
        if not self.states.start(sequence):
            return False
        if self._reserve_from([], sequence, sequence.max_len):
            return True
        self.states.free(sequence)
        return False

    def truncate(self, sequence: Sequence, length: int) -> None:
        """The tokens of a sequence behind its first ``length`` have changed or gone: nothing of them stays computed.

        States that cannot go back so far are restored from the prefix cache, or computed again.
        """
        if sequence.memory is None:
            return
        self.prefix_cache.release(sequence)
        if not self.states.truncate(sequence, min(length, sequence.num_computed)):
            self.states.rewind(sequence)
            self.prefix_cache.restore(sequence)

    def _schedule_decoding(self, sequence: Sequence) -> None:
        room = sequence.max_len - len(sequence.token_ids) - 1
        num_drafts = max(min(len(sequence.draft_token_ids), DRAFT_ROWS - 1, room), 0)
        if not self._reserve_unused(sequence, 1 + num_drafts + self.num_lookahead):
            num_drafts = 0  # no other sequence gives way to drafts
            if not self._reserve(sequence, 1):
                return
        self._entries[sequence] = ScheduledSequence(sequence, 1 + num_drafts, num_drafts)

    def _schedule_prompts(self) -> None:
        prompts = [sequence for sequence in self._running if sequence not in self._entries]
        budget = self.limits.max_step_tokens - sum(entry.num_tokens for entry in self._entries.values())
        wanted = [self._chunk_wanted(sequence) for sequence in prompts]
        for sequence, num_tokens in zip(prompts, _shares(budget, wanted), strict=True):
            if not num_tokens or sequence.memory is None:
                continue
            if self._reserve_unused(sequence, num_tokens + self.num_lookahead) or self._reserve(sequence, num_tokens):
                self._entries[sequence] = ScheduledSequence(sequence, num_tokens)

    def _chunk_wanted(self, sequence: Sequence) -> int:
        boundary = self.prefix_cache.next_boundary(sequence)
        until_boundary = sequence.num_tokens_left if boundary is None else boundary - sequence.num_computed
        return min(sequence.num_tokens_left, until_boundary, self.limits.prefill_chunk)

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Pages for a step, if need be from others; else the sequence itself gives way."""
        behind = self._running[bisect_left(self._running, sequence.place_in_line, key=_PLACE) + 1 :]
        if self._reserve_from(behind, sequence, num_tokens):
            return True
        self._preempt(sequence)
        return False

    def _reserve_unused(self, sequence: Sequence, num_tokens: int) -> bool:
        """Pages for a step that no other sequence needs, as far as the sequence can get; False if they are too few."""
        return self._reserve_from([], sequence, min(num_tokens, sequence.max_len - sequence.num_computed))

    def _reserve_from(self, victims: list[Sequence], sequence: Sequence, num_tokens: int) -> bool:
        return self.states.reserve(sequence, num_tokens) or (
            self._make_room(lambda: self.states.num_missing(sequence, num_tokens), victims)
            and self.states.reserve(sequence, num_tokens)
        )

    def _admit(self) -> None:
        while self._waiting:
            sequence = self._waiting[0]
            state = (sequence, self._num_freed, self.states.blocks.num_releases)
            is_refused = self._refused == state and bool(self._running)
            if is_refused or not self._start(sequence):
                # As it is now: what the attempt itself has freed is no reason for another.
                self._refused = (sequence, self._num_freed, self.states.blocks.num_releases)
                return
            _take_out(self._waiting, sequence)
            insort(self._running, sequence, key=_PLACE)

    def _start(self, sequence: Sequence) -> bool:
        """Memory for all tokens of a waiting sequence; False, and it has none, if that takes too much from others."""
        lower = [running for running in self._running if running.priority > sequence.priority]
        lower = lower[bisect_left(lower, sequence.place_in_line, key=_PLACE) :]
        if not lower and not self._has_place:
            return False
        match = self.prefix_cache.match(sequence)
        num_pages = self.states.num_pages(len(sequence.token_ids)) - (match.num_shared_pages if match else 0)
        # A page for each that goes on running, so that the newcomer is not the next to give way.
        num_pages += len(self._running) - len(lower)
        if not self._make_room(lambda: num_pages, lower):
            return False
        if not self._has_place:
            self._preempt(lower.pop())
        if not self.states.start(sequence):
            return False
        num_restored = self.prefix_cache.restore(sequence)
        if not self._reserve_from(lower, sequence, sequence.num_tokens_left):
            # A draft head writes into the last page of what is restored: where the pool has none for a copy, and nobody
            # is waited for, the cache has to give up its own.
            num_restored = 0
            self.prefix_cache.release(sequence)
            self.states.rewind(sequence)
            if self._running or not self._reserve_from([], sequence, sequence.num_tokens_left):
                self._free(sequence)
                return False
        if not sequence.metrics.num_preemptions:
            self.metrics.cached(sequence.metrics, len(sequence.token_ids), num_restored)
        return True

    @property
    def _has_place(self) -> bool:
        """Whether one more can run."""
        return len(self._running) < self.max_num_seqs and self.states.num_free_slots > 0

    def _make_room(self, num_needed: Callable[[], int], victims: list[Sequence]) -> bool:
        """See that as many pages are free: drop what the prefix cache keeps, then preempt ``victims``, the last first.

        False if all that is not enough; then only the prefix cache has lost.
        """
        while (missing := num_needed() - self.num_free_blocks) > 0 and self.prefix_cache.evict(missing):
            pass
        held = sum(len(victim.memory.blocks) for victim in victims if victim.memory is not None)
        if num_needed() > self.num_free_blocks + held:
            return False
        while num_needed() > self.num_free_blocks:
            if not victims:
                return False
            self._preempt(victims.pop())
            self.prefix_cache.evict(num_needed() - self.num_free_blocks)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back in line; what it has computed is lost."""
        _take_out(self._running, sequence)
        self._entries.pop(sequence, None)
        self._free(sequence)
        self._num_freed += 1
        insort(self._waiting, sequence, key=_PLACE)
        self.metrics.preempted(sequence.metrics)

    def _free(self, sequence: Sequence) -> None:
        if sequence.memory is not None:
            self.prefix_cache.release(sequence)
        self.states.free(sequence)


def _shares(budget: int, wanted: SequenceOf[int]) -> list[int]:
    """What each gets: up to an equal share of half the budget, and of the rest what the ones before it leave."""
    if not wanted:
        return []
    share = budget // (2 * len(wanted))
    granted = [min(want, share) for want in wanted]
    rest = budget - sum(granted)
    for index, want in enumerate(wanted):
        more = min(want - granted[index], rest)
        granted[index] += more
        rest -= more
    return granted


def _take_out(queue: list[Sequence], sequence: Sequence) -> None:
    """Remove a sequence from a queue, if it is there."""
    index = bisect_left(queue, sequence.place_in_line, key=_PLACE)
    if index < len(queue) and queue[index] is sequence:
        del queue[index]
