"""Decides which sequences run how many tokens in the next step, and owns slots and pages."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from qwen4exp_trt.errors import RequestError
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.sequence import Memory, Sequence


@dataclass(frozen=True)
class ScheduledSequence:
    """A sequence and how many of its tokens the step runs: some that it has, and behind its last one some drafts."""

    sequence: Sequence
    num_tokens: int
    num_drafts: int = 0
    """Of the tokens."""
    start: int = field(init=False)
    """The position of the first."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "start", self.sequence.num_computed)

    @property
    def samples(self) -> bool:
        """True when the step runs the sequence's last token, so that the next one can be sampled."""
        return self.start + self.num_tokens - self.num_drafts == len(self.sequence.token_ids)

    @property
    def num_logits_rows(self) -> int:
        """Rows whose logits the step gives: of the sequence's last token and of its drafts."""
        return self.num_drafts + 1 if self.samples else 0

    @property
    def num_prompt_tokens(self) -> int:
        """How many of the tokens are the prompt's."""
        left = len(self.sequence.prompt_token_ids) - self.sequence.num_computed
        return max(min(left, self.num_tokens), 0)


class Scheduler:
    """First come, first served, with chunked prefill beside decoding sequences in one step.

    A sequence starts when a slot and the pages for its longest possible length are free, so that a running sequence
    never lacks memory.
    """

    def __init__(self, limits: EngineLimits, num_blocks: int, max_num_seqs: int | None = None) -> None:
        self.limits, self.num_blocks = limits, num_blocks
        self.max_num_seqs = limits.max_batch_size if max_num_seqs is None else max_num_seqs
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._free_slots = list(reversed(range(limits.num_slots)))
        self._free_blocks = list(reversed(range(num_blocks)))

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
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_free_blocks(self) -> int:
        return len(self._free_blocks)

    def check_capacity(self, max_len: int) -> None:
        """`RequestError` if a sequence of ``max_len`` tokens could never start."""
        num_blocks = self._blocks_for(max_len)
        if num_blocks > self.num_blocks:
            raise RequestError(
                f"the request may take {max_len} tokens, {num_blocks} pages of the KV cache, but there are "
                f"{self.num_blocks}; lower max_tokens or give the cache more pages"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that passes `check_capacity`."""
        self._waiting.append(sequence)

    def schedule(self) -> list[ScheduledSequence]:
        """The sequences of the next step: those that decode first, then prompts, up to the step's token budget."""
        self._admit()
        budget, scheduled = self.limits.max_step_tokens, []
        for sequence in sorted(self._running, key=lambda running: running.num_tokens_left > 1):
            num_tokens = min(sequence.num_tokens_left, self.limits.prefill_chunk, budget)
            if num_tokens > 0:
                num_drafts = min(len(sequence.draft_token_ids), budget - num_tokens)
                scheduled.append(ScheduledSequence(sequence, num_tokens + num_drafts, num_drafts))
                budget -= num_tokens + num_drafts
        return scheduled

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, and free its memory."""
        if sequence in self._running:
            self._running.remove(sequence)
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        memory, sequence.memory = sequence.memory, None
        if memory is not None:
            self._free_slots.append(memory.slot)
            self._free_blocks.extend(reversed(memory.blocks))

    def acquire_memory(self, sequence: Sequence) -> bool:
        """Give ``sequence`` a slot and the pages for its longest possible length, until `finish`; False if too few
        are free."""
        num_blocks = self._blocks_for(sequence.max_len)
        if not self._free_slots or num_blocks > len(self._free_blocks):
            return False
        sequence.memory = Memory(self._free_slots.pop(), [self._free_blocks.pop() for _ in range(num_blocks)])
        return True

    def _admit(self) -> None:
        while self._waiting and self.num_running < self.max_num_seqs and self.acquire_memory(self._waiting[0]):
            self._running.append(self._waiting.popleft())

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.limits.block_size)
