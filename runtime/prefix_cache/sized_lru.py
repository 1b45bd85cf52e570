"""Things of known sizes in the order of their last use, within a budget of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

_K = TypeVar("_K", bound=Hashable)


class SizedLRU(Generic[_K]):
    """The sizes of what is kept, the least recently used first. The owner removes what `excess` says is too much."""

    def __init__(self, budget: int) -> None:
        self.budget, self.num_bytes = budget, 0
        self._sizes: OrderedDict[_K, int] = OrderedDict()

    def __contains__(self, key: _K) -> bool:
        return key in self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[_K]:
        """The least recently used first."""
        return iter(self._sizes)

    def add(self, key: _K, size: int) -> None:
        """Take ``key`` as the most recently used, in place of what it was."""
        self.remove(key)
        self._sizes[key] = size
        self.num_bytes += size

    def touch(self, key: _K) -> None:
        """``key`` is used, if it is here."""
        if key in self._sizes:
            self._sizes.move_to_end(key)

    def demote(self, key: _K) -> None:
        """``key`` is the next to go, if it is here."""
        if key in self._sizes:
            self._sizes.move_to_end(key, last=False)

    def remove(self, key: _K) -> bool:
        """False if it was not here."""
        size = self._sizes.pop(key, None)
        self.num_bytes -= size or 0
        return size is not None

    def excess(self, size: int = 0) -> bool:
        """True if there is something here to remove before ``size`` more bytes are within the budget."""
        return bool(self._sizes) and self.num_bytes + size > self.budget

    @property
    def oldest(self) -> _K:
        return next(iter(self._sizes))
