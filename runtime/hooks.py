"""What the scheduler and the serving loop call in a prefix cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from qwen4exp_trt.runtime.sequence import Sequence


@dataclass(frozen=True)
class Match:
    """What a prefix cache has of a sequence's tokens."""

    length: int
    """Tokens."""
    num_shared_pages: int
    """Pages of them that are on the device, so that restoring takes no free page for them."""


class PrefixCache(Protocol):
    """Keeps the states of prefixes, for whoever begins with them."""

    def match(self, sequence: Sequence) -> Match | None:
        """What `restore` would restore; nothing is moved."""
        ...

    def restore(self, sequence: Sequence) -> int:
        """Give a sequence that has a slot and no page the states of its longest known prefix.

        At least one of its tokens is left to run. Returns how many tokens are restored, 0 if none.
        """
        ...

    def next_boundary(self, sequence: Sequence) -> int | None:
        """A length beyond what is computed at which the states are wanted: a chunk ends there."""
        ...

    def after_step(self, sequence: Sequence) -> None:
        """A step has advanced a sequence, whose memory says which lengths its states can serve."""
        ...

    def evict(self, num_pages: int) -> int:
        """Drop what was least recently used until ``num_pages`` pages are free that were not, or no more can become.

        Returns how many became free. Pages that a sequence holds as well stay.
        """
        ...

    def release(self, sequence: Sequence) -> None:
        """A sequence is about to lose its memory, for good or not."""
        ...

    def close(self) -> None:
        """Write what is to be kept beyond the process; nothing is called afterwards."""
        ...


class NoPrefixCache:
    """Keeps nothing."""

    def match(self, sequence: Sequence) -> Match | None:
        return None

    def restore(self, sequence: Sequence) -> int:
        return 0

    def next_boundary(self, sequence: Sequence) -> int | None:
        return None

    def after_step(self, sequence: Sequence) -> None:
        pass

    def evict(self, num_pages: int) -> int:
        return 0

    def release(self, sequence: Sequence) -> None:
        pass

    def close(self) -> None:
        pass
