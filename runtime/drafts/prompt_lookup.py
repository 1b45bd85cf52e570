"""What followed the last tokens of a text where they stood before."""

from __future__ import annotations

from collections.abc import Sequence

MIN_NGRAM, MAX_NGRAM = 2, 5
"""Last tokens that must stand in front of a continuation, and the most that are compared."""
_MAX_PLACES = 32
"""Places that are looked at, the latest ones: what a text repeats most, such as spaces, stands in thousands."""


class PromptLookup:
    """The places of every `MIN_NGRAM` adjacent tokens of a text that grows.

    A lookup takes the same time in any text.
    """

    def __init__(self) -> None:
        self._token_ids: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}
        """The end of the last place of an n-gram."""
        self._previous: list[int] = [-1] * MIN_NGRAM
        """For each end of an n-gram, the end of the one before that is equal; -1: none."""

    def __len__(self) -> int:
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """The text goes on with ``token_ids``."""
        own = self._token_ids
        for token_id in token_ids:
            own.append(token_id)
            end = len(own)
            if end >= MIN_NGRAM:
                ngram = tuple(own[end - MIN_NGRAM :])
                self._previous.append(self._latest.get(ngram, -1))
                self._latest[ngram] = end

    def continuation(self, count: int) -> list[int]:
        """``count`` tokens as they followed the longest match of the last ones, of equally long ones the latest.

        Empty if the last `MIN_NGRAM` tokens stand nowhere before. A continuation that runs into the end of the text
        goes on with what it began with.
        """
        own, end = self._token_ids, len(self._token_ids)
        best, best_length = -1, 0
        place = self._previous[end] if end >= MIN_NGRAM else -1
        for _ in range(_MAX_PLACES):
            if place < 0 or best_length == MAX_NGRAM:
                break
            length = MIN_NGRAM
            while length < min(MAX_NGRAM, place) and own[place - length - 1] == own[end - length - 1]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            place = self._previous[place]
        period = end - best
        return [own[best + index % period] for index in range(count)] if best >= 0 else []
