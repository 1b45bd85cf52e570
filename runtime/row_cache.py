"""Keeps rows that were used lately in a fixed amount of memory."""

from __future__ import annotations

from threading import Lock

import numpy as np
import torch
from torch import Tensor

_WAYS = 8
"""Places that a row may be in."""
_EMPTY = -1
_STAGED_ROWS = 512
_STAGED_SHARE = 8
"""Rows that are copied in one turn, and how many times as many the cache has at least."""


class RowCache:
    """``capacity`` rows of ``width`` elements by their ids (0 and above), the least recently used replaced first.

    It has sets of `_WAYS` places, of which an id may be in one: so finding, keeping and replacing thousands of rows are
    a few array operations. What is replaced is the least recently used row of a set. Threads take turns.
    """

    def __init__(self, capacity: int, width: int, dtype: torch.dtype) -> None:
        self._num_sets, ways = max(1, capacity // _WAYS), min(capacity, _WAYS)
        row_bytes = width * dtype.itemsize
        # Torch copies rows of integers several times as fast as rows of BF16.
        self._element = torch.int64 if row_bytes % 8 == 0 else torch.uint8
        self._memory = torch.empty(self._num_sets * ways, row_bytes // self._element.itemsize, dtype=self._element)
        num_staged = max(1, min(_STAGED_ROWS, self.capacity // _STAGED_SHARE))
        self._staging = self._memory.new_empty(num_staged, self._memory.shape[1])
        self._ids = np.full((self._num_sets, ways), _EMPTY, dtype=np.int64)
        self._last_used = np.zeros((self._num_sets, ways), dtype=np.int64)
        self._clock = 0
        self._lock = Lock()

    @staticmethod
    def capacity_within(num_bytes: int, width: int, dtype: torch.dtype) -> int:
        """How many rows a cache has that takes no more than ``num_bytes``."""
        row_bytes = width * dtype.itemsize
        return num_bytes // (row_bytes + -(-row_bytes // _STAGED_SHARE) + 2 * np.int64().itemsize)

    @property
    def capacity(self) -> int:
        return len(self._memory)

    @property
    def num_bytes(self) -> int:
        """All memory that it ever takes."""
        return self._memory.nbytes + self._staging.nbytes + self._ids.nbytes + self._last_used.nbytes

    def has(self, rows: np.ndarray) -> np.ndarray:
        """Which of the ids ``[n]`` are here, without counting as a use."""
        with self._lock:
            return self._places_of(rows) >= 0

    def take(self, rows: np.ndarray, out: Tensor) -> np.ndarray:
        """Copy what is here of the ids ``[n]``, which may repeat, to the rows of ``out``; says which were (bool)."""
        with self._lock:
            places = self._places_of(rows)
            is_here = places >= 0
            self._clock += 1
            if is_here.all():
                torch.index_select(self._memory, 0, torch.from_numpy(places), out=out.view(self._element))
                self._last_used.reshape(-1)[places] = self._clock
            elif is_here.any():
                found, targets = places[is_here], np.flatnonzero(is_here)
                self._copy(self._memory, found, out.view(self._element), targets)
                self._last_used.reshape(-1)[found] = self._clock
        return is_here

    def put(self, rows: np.ndarray, values: Tensor) -> None:
        """Keep rows: distinct ids ``[n]`` and their ``values`` ``[n, width]``, as far as each finds a place."""
        if not self.capacity:
            return
        with self._lock:
            self._clock += 1
            new = np.flatnonzero(self._places_of(rows) < 0)
            sets, group, counts = np.unique(self._sets_of(rows[new]), return_inverse=True, return_counts=True)
            # The rows of a set replace its oldest, one each.
            by_set = np.argsort(group, kind="stable")
            rank = np.empty_like(by_set)
            rank[by_set] = np.arange(len(new)) - np.repeat(np.cumsum(counts) - counts, counts)
            has_place = rank < self._ids.shape[1]
            new, group, rank = new[has_place], group[has_place], rank[has_place]
            ways = np.argsort(self._last_used[sets], axis=1)[group, rank]
            self._ids[sets[group], ways] = rows[new]
            self._last_used[sets[group], ways] = self._clock
            places = sets[group] * self._ids.shape[1] + ways
            self._copy(values.contiguous().view(self._element), new, self._memory, places)

    def _copy(self, source: Tensor, rows: np.ndarray, target: Tensor, places: np.ndarray) -> None:
        """Rows of ``source`` to distinct ``places`` of ``target``, through memory that is in a cache of the CPU."""
        for start in range(0, len(rows), len(self._staging)):
            part = slice(start, start + len(self._staging))
            staged = self._staging[: len(rows[part])]
            torch.index_select(source, 0, torch.from_numpy(rows[part]), out=staged)
            target.index_copy_(0, torch.from_numpy(places[part]), staged)

    def _sets_of(self, rows: np.ndarray) -> np.ndarray:
        # Rows of one token are about equally far apart, so neighbors are not enough to spread them.
        return (rows * 0x9E3779B1 >> 15) % self._num_sets

    def _places_of(self, rows: np.ndarray) -> np.ndarray:
        """Where in memory each row is, -1 for one that is not."""
        if not self.capacity:
            return np.full(len(rows), _EMPTY)
        sets = self._sets_of(rows)
        matches = self._ids[sets] == rows[:, None]
        ways = matches.argmax(axis=1)
        is_here = matches[np.arange(len(rows)), ways]
        return np.where(is_here, sets * self._ids.shape[1] + ways, _EMPTY)
