"""The pages of the paged states: which are free, and how many hold each of the others."""

from __future__ import annotations

from collections.abc import Iterable


class BlockPool:
    """Counts the references to each of ``num_blocks`` pages; one without any is free. The lowest are dealt first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_releases = 0
        """How often pages have become free: a failed allocation need not be tried again until it changes."""
        self._free = list(reversed(range(num_blocks)))
        self._references = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """``count`` pages with one reference each; None, and nothing is allocated, if fewer are free."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each page, none of which is free."""
        for block in blocks:
            assert self._references[block] > 0, f"page {block} is free"
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each page."""
        freed = []
        for block in blocks:
            assert self._references[block] > 0, f"page {block} is free"
            self._references[block] -= 1
            if not self._references[block]:
                freed.append(block)
        if freed:
            self.num_releases += 1
            self._free.extend(reversed(freed))

    def is_shared(self, block: int) -> bool:
        """True when others hold the page as well, so that nobody may write it."""
        return self._references[block] > 1
