from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen4exp_trt.runtime.drafts.prompt_lookup import MAX_NGRAM, MIN_NGRAM, PromptLookup


def lookup(token_ids: list[int], count: int) -> list[int]:
    places = PromptLookup()
    places.extend(token_ids)
    return places.continuation(count)


@pytest.mark.parametrize(
    ("token_ids", "expected"),
    [
        ([], []),
        ([1], []),
        ([1, 2], []),
        ([1, 2, 3, 4], []),
        ([9, 2, 3, 9], []),
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),
        ([7, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2], [3, 8, 1]),
        ([5, 6, 5, 6], [5, 6, 5]),
        ([8, 8, 8], [8, 8, 8]),
    ],
    ids=["empty", "one", "two", "new", "unigram", "before", "latest", "longest", "period 2", "period 1"],
)
def test_the_continuation_of_the_longest_match_and_of_those_the_latest(
    token_ids: list[int], expected: list[int]
) -> None:
    assert lookup(token_ids, 3) == expected


def slow_lookup(token_ids: list[int], count: int) -> list[int]:
    """All places, by the definition."""
    end = len(token_ids)
    for length in range(MAX_NGRAM, MIN_NGRAM - 1, -1):
        for place in range(end - 1, length - 1, -1):
            if end >= length and token_ids[place - length : place] == token_ids[end - length :]:
                return (token_ids[place:] * count)[:count]
    return []


@given(st.lists(st.integers(0, 2), max_size=24), st.integers(1, 7))
def test_it_is_what_a_search_of_the_whole_text_finds(token_ids: list[int], count: int) -> None:
    assert lookup(token_ids, count) == slow_lookup(token_ids, count)


@given(st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=8))
def test_a_text_may_grow_in_any_pieces(pieces: list[list[int]]) -> None:
    places = PromptLookup()
    for piece in pieces:
        places.extend(piece)
    whole = [token for piece in pieces for token in piece]
    assert len(places) == len(whole)
    assert places.continuation(4) == lookup(whole, 4)


def test_a_lookup_does_not_slow_down_with_the_text() -> None:
    """What a text repeats everywhere is looked up at its last places only."""
    places = PromptLookup()
    places.extend([1, 2, 3] * 30_000 + [4, 1, 2])
    start = time.perf_counter()
    for _ in range(100):
        assert places.continuation(2) == [3, 4] or places.continuation(2) == [3, 1]
    assert time.perf_counter() - start < 0.5
