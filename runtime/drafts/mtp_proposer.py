"""Drafts of the checkpoint's draft head, which reads the model's residual stack and the token that followed.

A *pair* i is the model's stack at position i together with the token at i + 1; the head's states hold a row for each.
After every step the head has as many pairs as the model has tokens. Rejected drafts bring none: the next pairs are
written over what the states have of them. To draft more than one token the head goes on with its own stack, for rows
that the next step's pairs are written over as well.

States that are restored, forked or taken back are followed by other tokens than before, so their last pair is computed
again. Its stack is kept: the last 8 of every sequence, by position, in a state of its own.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from qwen4exp_trt.runtime.drafts.draft_sampler import DraftSampler
from qwen4exp_trt.runtime.limits import DRAFT_ROWS
from qwen4exp_trt.runtime.sampler import greedy_operands
from qwen4exp_trt.runtime.specs import NUM_SLOTS, STACK, StateKind, StateSpec
from qwen4exp_trt.runtime.state_pool import StatePool, allocate_states
from qwen4exp_trt.runtime.step_inputs import pack_step
from qwen4exp_trt.runtime.step_result import DrawnStep

if TYPE_CHECKING:  # they import this package
    from qwen4exp_trt.runtime.program_backend import ProgramBackend
    from qwen4exp_trt.runtime.scheduler import ScheduledSequence
    from qwen4exp_trt.runtime.sequence import Sequence
    from qwen4exp_trt.runtime.sequence_memory import Memory


@dataclass(frozen=True)
class _Pairs:
    """Pairs of a sequence, from position ``start`` on. ``rows``: of the model's step that gave their stacks."""

    sequence: Sequence
    start: int
    rows: slice

    @property
    def count(self) -> int:
        return self.rows.stop - self.rows.start

    @property
    def end(self) -> int:
        return self.start + self.count


class MtpProposer:
    """Runs ``head``, the backend of a bundle's draft head, up to ``max_drafts`` times a step.

    ``vocab_size`` and ``vocab_limit`` are those of the model's logits (`sampler.sample`). On a GPU a step waits once
    for the drafts, all sequences' together.
    """

    num_rewritten = 1

    def __init__(
        self,
        head: ProgramBackend,
        max_drafts: int,
        block_size: int,
        vocab_size: int,
        vocab_limit: int | None,
    ) -> None:
        self.num_lookahead = max_drafts - 1
        self._head, self._block_size = head, block_size
        self._sampler = DraftSampler(head.token_ids, vocab_size, vocab_limit, head.device)
        (spec,) = (spec for spec in head.program.inputs if spec.name == STACK)
        kind = StateKind.STACK_RING
        ring = StateSpec(f"mtp.{kind.value}", kind, 0, (NUM_SLOTS, DRAFT_ROWS, spec.shape[1]), spec.dtype)
        num_slots = next(len(head.states[spec.name]) for spec in head.states.specs if not spec.is_paged)
        states = allocate_states((ring,), 0, num_slots, head.device)
        self._ring = states[ring.name]
        self.states = StatePool((ring,), states)
        self._memories: WeakKeyDictionary[Sequence, Memory] = WeakKeyDictionary()
        """In which every pair of the tokens that are computed is there, with the tokens that the sequence has."""
        self._first: DrawnStep | None = None
        """What the head gave behind the last pairs of `_rows`."""
        self._rows: dict[Sequence, int] = {}
        """The row of each sequence in it."""
        self._greedy: dict[int, dict[str, Tensor]] = {}
        """Operands to draw the best tokens of so many rows."""

    def observe(self, entries: SequenceOf[ScheduledSequence], stack: Tensor | None) -> None:
        assert stack is not None, "a program that gives its stack"
        ends = np.cumsum([entry.num_tokens for entry in entries]).tolist()
        pairs = []
        for entry, end in zip(entries, ends, strict=True):
            if entry.sequence.memory is not None:
                first = end - entry.num_tokens
                num_kept = entry.sequence.num_computed - entry.start
                pairs.append(_Pairs(entry.sequence, entry.start, slice(first, first + num_kept)))
        self._rows = {each.sequence: row for row, each in enumerate(pairs)}
        if not pairs:
            return
        self._compute_last_pairs_again([each for each in pairs if each.start and not self._is_complete(each.sequence)])
        self._keep_stacks(pairs, stack)
        rows = list(chain.from_iterable(range(each.rows.start, each.rows.stop) for each in pairs))
        self._first = self._run(
            [each.sequence for each in pairs],
            [each.start for each in pairs],
            [each.sequence.token_ids[each.start + 1 : each.end + 1] for each in pairs],
            stack if len(rows) == len(stack) else stack[self._on_device(rows)],
        )
        for each in pairs:
            self._memories[each.sequence] = each.sequence.held_memory

    def _is_complete(self, sequence: Sequence) -> bool:
        return self._memories.get(sequence) is sequence.memory

    def _compute_last_pairs_again(self, pairs: SequenceOf[_Pairs]) -> None:
        """The pair before those of a step, for sequences whose states another sequence or another text has left."""
        if pairs:
            sequences, positions = [each.sequence for each in pairs], [each.start - 1 for each in pairs]
            slots = [sequence.held_memory.slot for sequence in sequences]
            slots, places = self._on_device([slots, [position % DRAFT_ROWS for position in positions]])
            stack = self._ring[slots, places]
            self._run(sequences, positions, [[each.sequence.token_ids[each.start]] for each in pairs], stack)

    def _keep_stacks(self, pairs: SequenceOf[_Pairs], stack: Tensor) -> None:
        """Those of the last `DRAFT_ROWS` positions, for whoever goes on from here or from one of the rows before."""
        slots, places, rows = [], [], []
        for each in pairs:
            for back in range(min(each.count, DRAFT_ROWS), 0, -1):
                slots.append(each.sequence.held_memory.slot)
                places.append((each.end - back) % DRAFT_ROWS)
                rows.append(each.rows.stop - back)
        slots, places, rows = self._on_device([slots, places, rows])
        self._ring[slots, places] = stack[rows]

    def propose(self, wanted: SequenceOf[tuple[Sequence, int]]) -> None:
        counted = [(min(count, self._num_possible(sequence)), sequence) for sequence, count in wanted]
        counted.sort(key=lambda pair: -pair[0])
        counts, sequences = [count for count, _ in counted], [sequence for _, sequence in counted]
        assert self._first is not None, "a step was observed"
        step = _rows_of(self._first, [self._rows[sequence] for sequence in sequences])
        drafts = self._sampler.start([sequence.sample_request for sequence in sequences])
        for index in range(counts[0]):
            token_ids = drafts.draw(step)
            active = sum(count > index + 1 for count in counts)
            if active == 0:
                break
            assert step.stack is not None, "a draft head gives its stack"
            going_on = sequences[:active]
            starts = [sequence.num_computed + index for sequence in going_on]
            step = self._run(going_on, starts, token_ids[:active], step.stack[:active])
        for sequence, count, (token_ids, probs) in zip(sequences, counts, drafts.finish(), strict=True):
            sequence.set_drafts(token_ids[:count], None if probs is None else probs[:count])

    def _num_possible(self, sequence: Sequence) -> int:
        """Drafts for which the sequence has pages: the head's rows of all but the first are behind its tokens."""
        room = len(sequence.held_memory.blocks) * self._block_size - sequence.num_computed
        return room + 1

    def _run(
        self,
        sequences: SequenceOf[Sequence],
        starts: SequenceOf[int],
        token_ids: SequenceOf[SequenceOf[int]] | Tensor,
        stack: Tensor,
    ) -> DrawnStep:
        """Run the head, and draw the best token behind the last row of each sequence.

        ``token_ids``: of each sequence, or int32 ``[n]`` on the device, one of each.
        """
        lengths, ids = np.ones(len(sequences), dtype=np.int64), np.zeros(len(sequences))
        if not isinstance(token_ids, Tensor):
            lengths = np.array([len(each) for each in token_ids])
            ids = np.fromiter(chain.from_iterable(token_ids), np.int32, lengths.sum())
        memories = [sequence.held_memory for sequence in sequences]
        inputs = pack_step(memories, np.array(starts), lengths, ids, lengths.cumsum() - 1)
        if isinstance(token_ids, Tensor):
            inputs["input_ids"] = token_ids
        if len(sequences) not in self._greedy:
            self._greedy[len(sequences)] = greedy_operands(len(sequences))
        return self._head.draw_step({**inputs, STACK: stack}, self._greedy[len(sequences)], self._sampler.limit)

    def _on_device(self, values: SequenceOf[int] | SequenceOf[SequenceOf[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._head.device, non_blocking=True)


def _rows_of(step: DrawnStep, rows: list[int]) -> DrawnStep:
    if rows == list(range(len(step.logits))):
        return step
    on_device = torch.tensor(rows).to(step.logits.device, non_blocking=True)
    stack = None if step.stack is None else step.stack[on_device]
    return DrawnStep(step.drawn[:, on_device], step.logits[on_device], stack)
