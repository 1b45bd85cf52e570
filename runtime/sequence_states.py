"""What can be done with the states of sequences: each operation acts on all states of a sequence or on none."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from torch import Tensor

from qwen4exp_trt.runtime.block_pool import BlockPool
from qwen4exp_trt.runtime.limits import DRAFT_ROWS, EngineLimits
from qwen4exp_trt.runtime.sequence import Sequence
from qwen4exp_trt.runtime.sequence_memory import Memory
from qwen4exp_trt.runtime.state_pool import Rows, StatePool


@dataclass(frozen=True)
class Snapshot:
    """The states of a sequence with ``length`` tokens; it holds a reference to each of its pages until it is released.

    ``window``: the context lengths that ``slot`` can serve, up to ``length``. ``blocks``: the pages of the first
    ``length`` tokens. ``slot``: `StatePool.read_slot`.
    """

    length: int
    window: range
    blocks: tuple[int, ...]
    slot: dict[str, Tensor]


class SequenceStates:
    """Deals the slots and pages of ``pool`` to sequences.

    A sequence that has memory has the states of its first ``num_computed`` tokens there. Pages may be shared with other
    sequences and with snapshots; one that a step will write is copied before (`reserve`). ``num_rewritten`` is how many
    rows before the next ones a step may write again behind `fork`, `truncate` and `restore`: those of a draft head,
    which depend on the token that follows.
    """

    def __init__(self, pool: StatePool, limits: EngineLimits, num_blocks: int, num_rewritten: int = 0) -> None:
        self.pool, self.block_size, self.blocks = pool, limits.block_size, BlockPool(num_blocks)
        self.num_rewritten = num_rewritten
        # The lowest is dealt first: a lone sequence is in slot 0, whose state a kernel fetches before it knows.
        self._free_slots = list(reversed(range(limits.num_slots)))

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def num_pages(self, num_tokens: int) -> int:
        """Pages of ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def start(self, sequence: Sequence) -> bool:
        """Give a sequence without memory a slot, and no page; False if none is free."""
        assert sequence.memory is None, f"request {sequence.request_id} has memory"
        if not self._free_slots:
            return False
        self._hold(sequence, Memory(self._free_slots.pop()), 0)
        return True

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """How many free pages `reserve` would take."""
        memory = sequence.held_memory
        end = self.num_pages(sequence.num_computed + num_tokens)
        return len(self._shared_pages(sequence, end)) + max(end - len(memory.blocks), 0)

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Make ready for a step of up to ``num_tokens`` more tokens: pages for them, and of its own all that it writes.

        False, and nothing is done, if too few pages are free.
        """
        memory = sequence.held_memory
        end = self.num_pages(sequence.num_computed + num_tokens)
        shared = self._shared_pages(sequence, end)
        num_new = max(end - len(memory.blocks), 0)
        if not shared and not num_new:
            return True
        blocks = self.blocks.allocate(len(shared) + num_new)
        if blocks is None:
            return False
        for index, block in zip(shared, blocks, strict=False):
            self.pool.copy_page(memory.blocks[index], block)
            self.blocks.release([memory.blocks[index]])
            memory.replace(index, block)
        memory.append(blocks[len(shared) :])
        return True

    def commit(self, sequence: Sequence, num_rows: int, num_kept: int | None = None) -> None:
        """A step ran ``num_rows`` tokens, of which the first ``num_kept`` (None: all) count."""
        memory, context = sequence.held_memory, sequence.num_computed
        length = context + (num_rows if num_kept is None else num_kept)
        lowest = context + 1 if num_rows <= DRAFT_ROWS else context + num_rows
        assert lowest <= length <= context + num_rows, "a step is taken back as far as its states allow"
        sequence.num_computed = length
        memory.window, memory.num_rewritten = range(lowest, length + 1), 0

    def fork(self, source: Sequence, target: Sequence) -> bool:
        """Give ``target``, which has no memory, the states of ``source``; False, and nothing is done, without a slot.

        The tokens that they stand for are the caller's business, here and below.
        """
        memory, length = source.held_memory, source.num_computed
        if not self.start(target):
            return False
        slot = target.held_memory.slot
        self.pool.copy_slot(memory.slot, slot)
        blocks = memory.blocks[: self.num_pages(length)]
        self.blocks.share(blocks)
        self._hold(target, Memory(slot, blocks, memory.window, self.num_rewritten), length)
        return True

    def truncate(self, sequence: Sequence, length: int) -> bool:
        """Take back all computed tokens but ``length``.

        False, and nothing is done, if the slot's states cannot go back so far (see `Memory`): `rewind` then.
        """
        memory = sequence.held_memory
        assert 0 <= length <= sequence.num_computed, (length, sequence.num_computed)
        if length > 0 and length not in memory.window:
            return False
        self.blocks.release(memory.pop_from(self.num_pages(length)))
        window = range(memory.window.start, length + 1) if length else range(1)
        self._hold(sequence, Memory(memory.slot, memory.blocks, window, self.num_rewritten), length)
        return True

    def rewind(self, sequence: Sequence) -> None:
        """Take back all computed tokens; the sequence keeps its slot."""
        self.truncate(sequence, 0)

    def snapshot(self, sequence: Sequence, length: int | None = None) -> Snapshot:
        """The states of the first ``length`` tokens (None: all that are computed), of those that the slot can serve.

        `ValueError` for any other length. To be given to `release` in the end.
        """
        memory = sequence.held_memory
        chosen = sequence.num_computed if length is None else length
        if chosen == 0 or chosen not in memory.window:
            raise ValueError(f"a snapshot of {chosen} tokens of a sequence whose states are those of {memory.window}")
        slot = self.pool.read_slot(memory.slot)
        blocks = tuple(memory.blocks[: self.num_pages(chosen)])
        self.blocks.share(blocks)
        return Snapshot(chosen, range(memory.window.start, chosen + 1), blocks, slot)

    def restore(self, sequence: Sequence, snapshot: Snapshot) -> bool:
        """Give a sequence the states of a snapshot in place of its own; False, and nothing is done, without a slot."""
        if sequence.memory is None and not self.start(sequence):
            return False
        self.restore_pages(sequence, snapshot.blocks, snapshot.slot, snapshot.window)
        self.blocks.share(snapshot.blocks)
        return True

    def restore_pages(self, sequence: Sequence, blocks: SequenceOf[int], slot: Rows, window: range) -> None:
        """Give a sequence that has a slot the states of ``window[-1]`` tokens in place of its own.

        It takes over a reference to each page. ``slot`` can serve the context lengths of ``window``.
        """
        memory = sequence.held_memory
        assert len(blocks) == self.num_pages(window[-1]), "pages of all tokens and no more"
        self.pool.write_slot(memory.slot, slot)
        self.blocks.release(memory.blocks)
        self._hold(sequence, Memory(memory.slot, blocks, window, self.num_rewritten), window[-1])

    def release(self, snapshot: Snapshot) -> None:
        """Drop a snapshot's references to its pages."""
        self.blocks.release(snapshot.blocks)

    def free(self, sequence: Sequence) -> None:
        """Take a sequence's memory, if it has some: what it computed is lost."""
        memory, sequence.memory = sequence.memory, None
        sequence.num_computed = 0
        sequence.set_drafts(())
        if memory is not None:
            self._free_slots.append(memory.slot)
            self.blocks.release(memory.blocks)

    def _hold(self, sequence: Sequence, memory: Memory, length: int) -> None:
        sequence.memory, sequence.num_computed = memory, length
        sequence.set_drafts(())

    def _shared_pages(self, sequence: Sequence, end: int) -> list[int]:
        """Places of the pages in front of ``end`` that the next rows are in and that others hold as well."""
        memory = sequence.held_memory
        first = max(sequence.num_computed - memory.num_rewritten, 0) // self.block_size
        blocks = memory.blocks[first:end]
        return [index for index, block in enumerate(blocks, first) if self.blocks.is_shared(block)]
