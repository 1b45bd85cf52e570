"""What a running sequence holds: a slot of the per-sequence states and pages of the paged ones."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

_FIRST_CAPACITY = 16


class Memory:
    """A slot and pages, in the order of the positions; only `SequenceStates` changes them.

    ``window`` has the context lengths that the slot's states can serve next, the largest of them what is computed.
    ``num_rewritten`` is how many rows before the next ones may be written again.
    """

    def __init__(self, slot: int, blocks: Iterable[int] = (), window: range = range(1), num_rewritten: int = 0) -> None:
        self.slot, self.window, self.num_rewritten = slot, window, num_rewritten
        self.blocks: list[int] = []
        self._row = np.full(_FIRST_CAPACITY, -1, dtype=np.int32)
        self.append(blocks)

    def block_row(self, width: int) -> np.ndarray:
        """`blocks` as int32 ``[width]``, -1 behind the last. No step has to convert them: there may be thousands."""
        if width > len(self._row):
            self._grow(width)
        return self._row[:width]

    def append(self, blocks: Iterable[int]) -> None:
        """Add pages behind the last."""
        start = len(self.blocks)
        self.blocks.extend(blocks)
        if len(self.blocks) > len(self._row):
            self._grow(len(self.blocks))
        self._row[start : len(self.blocks)] = self.blocks[start:]

    def replace(self, index: int, block: int) -> None:
        """Another page in the place of one."""
        self.blocks[index] = self._row[index] = block

    def pop_from(self, count: int) -> list[int]:
        """Take out all pages but the first ``count``."""
        taken = self.blocks[count:]
        del self.blocks[count:]
        self._row[count:] = -1
        return taken

    def _grow(self, width: int) -> None:
        grown = np.full(max(width, 2 * len(self._row)), -1, dtype=np.int32)
        grown[: len(self._row)] = self._row
        self._row = grown
