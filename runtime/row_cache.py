"""Keeps rows that were used lately in a fixed amount of memory."""

from __future__ import annotations

from threading import Lock

import numpy as np
import torch
from torch import Tensor

_WAYS = 8
"""Places that a row may be in."""
_EMPTY = -1


class RowCache:
    """``capacity`` rows of ``width`` elements by their ids (0 and above), the least recently used replaced first.

    It has sets of `_WAYS` places, of which an id may be in one: so finding, keeping and replacing thousands of rows are
    a few array operations. What is replaced is the least recently used row of a set. Threads take turns.
    """

    def __init__(self, capacity: int, width: int, dtype: torch.dtype) -> None:
        self._num_sets, ways = max(1, capacity // _WAYS), min(capacity, _WAYS)
        self._memory = torch.empty((self._num_sets * ways, width), dtype=dtype)
        self._ids = np.full((self._num_sets, ways), _EMPTY, dtype=np.int64)
        self._last_used = np.zeros((self._num_sets, ways), dtype=np.int64)
        self._clock = 0
        self._lock = Lock()

    @property
    def capacity(self) -> int:
        return len(self._memory)

    @property
    def num_bytes(self) -> int:
        """All memory that it ever takes."""
        return self._memory.nbytes + self._ids.nbytes + self._last_used.nbytes

    def has(self, rows: np.ndarray) -> np.ndarray:
        """Which of the ids ``[n]`` are here, without counting as a use."""
        with self._lock:
            return self._places_of(rows) >= 0

    def take(self, rows: np.ndarray, out: Tensor) -> np.ndarray:
        """Copy what is here of the ids ``[n]``, which may repeat, to the rows of ``out``; which were here (bool)."""
        with self._lock:
            places = self._places_of(rows)
            is_here = places >= 0
            self._clock += 1
            if is_here.all():
                torch.index_select(self._memory, 0, torch.from_numpy(places), out=out)
                self._last_used.reshape(-1)[places] = self._clock
            elif is_here.any():
                found = places[is_here]
                out[torch.from_numpy(is_here)] = self._memory[torch.from_numpy(found)]
                self._last_used.reshape(-1)[found] = self._clock
        return is_here

    def put(self, rows: np.ndarray, values: Tensor) -> None:
        """Keep rows: distinct ids ``[n]`` and their ``values`` ``[n, width]``."""
        if not self.capacity:
            return
        with self._lock:
            self._clock += 1
            is_new = self._places_of(rows) < 0
            left = np.flatnonzero(is_new)
            while len(left):
                sets = self._sets_of(rows[left])
                # One of each set in a turn, for each of which the oldest place is another.
                _, first = np.unique(sets, return_index=True)
                turn, sets = left[first], sets[first]
                ways = self._last_used[sets].argmin(axis=1)
                if (self._last_used[sets, ways] == self._clock).all():
                    break  # full of rows of this call
                self._ids[sets, ways] = rows[turn]
                self._last_used[sets, ways] = self._clock
                places = torch.from_numpy(sets * self._ids.shape[1] + ways)
                self._memory[places] = values[torch.from_numpy(turn)]
                left = np.delete(left, first)

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
