from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.stopping import StopChecker, StopUpdate

EOS = (90, 91)
NO_STOP = StopUpdate("")


def _checker(prompt: int = 3, max_seq_len: int = 1000, **fields: Any) -> StopChecker:
    fields.setdefault("max_tokens", None)
    return StopChecker(SamplingParams(**fields), EOS, prompt, max_seq_len)


def _feed_all(checker: StopChecker, pieces: Iterable[str]) -> list[StopUpdate]:
    """Updates up to and with the last one that the checker takes; every token has id 1."""
    updates = []
    for piece in pieces:
        updates.append(checker.feed(1, piece))
        if updates[-1].finish_reason is not None:
            break
    return updates


def _text(updates: Iterable[StopUpdate]) -> str:
    return "".join(update.text for update in updates)


# Tokens


@pytest.mark.parametrize("eos", EOS)
def test_every_eos_id_stops_and_its_text_is_not_shown(eos: int) -> None:
    checker = _checker()
    assert checker.feed(1, "a") == StopUpdate("a")
    assert checker.feed(eos, "<eos>") == StopUpdate("", "stop", eos)


def test_ignored_eos_is_an_ordinary_token_unless_it_is_a_stop_token() -> None:
    assert _checker(ignore_eos=True).feed(90, "<eos>") == StopUpdate("<eos>")
    assert _checker(ignore_eos=True, stop_token_ids=[90]).feed(90, "<eos>") == StopUpdate("", "stop", 90)


def test_stop_token_stops() -> None:
    checker = _checker(stop_token_ids=[5, 6])
    assert checker.feed(4, "a") == StopUpdate("a")
    assert checker.feed(6, "b") == StopUpdate("", "stop", 6)


def test_stop_token_is_shown_on_request() -> None:
    assert _checker(stop_token_ids=[5], include_stop_str_in_output=True).feed(5, "b") == StopUpdate("b", "stop", 5)


def test_stop_token_releases_text_held_back() -> None:
    checker = _checker(stop=["abc"])
    assert checker.feed(1, "xab") == StopUpdate("x")
    assert checker.feed(90, "c") == StopUpdate("ab", "stop", 90)


# Lengths


def test_max_tokens_ends_with_length_and_releases_text_held_back() -> None:
    checker = _checker(max_tokens=3, stop="abc")
    updates = [checker.feed(1, piece) for piece in ("x", "a", "b")]
    assert updates == [StopUpdate("x"), NO_STOP, StopUpdate("ab", "length")]


@pytest.mark.parametrize(("max_tokens", "count"), [(None, 7), (100, 7), (5, 5), (1, 1)])
def test_prompt_and_output_fill_at_most_max_seq_len(max_tokens: int | None, count: int) -> None:
    updates = _feed_all(_checker(prompt=3, max_seq_len=10, max_tokens=max_tokens), ["a"] * 20)
    assert len(updates) == count and updates[-1] == StopUpdate("a", "length")


def test_stop_wins_over_length_and_token_over_string() -> None:
    assert _checker(max_tokens=1).feed(90, "") == StopUpdate("", "stop", 90)
    assert _checker(max_tokens=1, stop="a").feed(1, "a") == StopUpdate("", "stop", "a")
    assert _checker(max_tokens=1, stop="a").feed(91, "a") == StopUpdate("", "stop", 91)


def test_misuse_is_an_assertion() -> None:
    with pytest.raises(AssertionError, match="no room"):
        _checker(prompt=10, max_seq_len=10)
    checker = _checker(max_tokens=1)
    checker.feed(1, "a")
    with pytest.raises(AssertionError, match="ended"):
        checker.feed(1, "b")


# Strings


def test_stop_string_over_several_tokens_is_never_shown_in_part() -> None:
    updates = _feed_all(_checker(stop="</think>"), ["so ", "<", "/th", "ink", "> tail"])
    assert [update.text for update in updates] == ["so ", "", "", "", ""]
    assert (updates[-1].finish_reason, updates[-1].stop_reason) == ("stop", "</think>")


def test_text_held_back_in_vain_is_shown_as_soon_as_it_differs() -> None:
    updates = _feed_all(_checker(stop="</think>"), ["a<", "/thi", "s", "<", "b"])
    assert [update.text for update in updates] == ["a", "", "</this", "", "<b"]


def test_stop_string_is_shown_on_request_without_what_follows() -> None:
    updates = _feed_all(_checker(stop="END", include_stop_str_in_output=True), ["a E", "ND", " tail"])
    assert _text(updates) == "a END" and updates[-1].stop_reason == "END"


def test_first_complete_stop_string_wins_and_the_longest_of_those() -> None:
    assert _checker(stop=["abc", "b"]).feed(1, "xabcd") == StopUpdate("xa", "stop", "b")
    assert _checker(stop=["b", "ab"]).feed(1, "xab") == StopUpdate("x", "stop", "ab")


def _stopped_by_character(text: str, stops: Sequence[str], include: bool) -> tuple[str, str | None]:
    """Text shown and stop string, looking at every end of the text in turn."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


few_letters = st.text("ab", min_size=1, max_size=4)


@settings(max_examples=500)
@given(st.lists(st.text("ab", max_size=4), min_size=1, max_size=8), st.lists(few_letters, max_size=3), st.booleans())
def test_pieces_do_not_matter(pieces: list[str], stops: list[str], include: bool) -> None:
    updates = _feed_all(_checker(stop=stops, max_tokens=len(pieces), include_stop_str_in_output=include), pieces)
    shown, stop = _stopped_by_character("".join(pieces), stops, include)
    assert _text(updates) == shown
    assert (updates[-1].finish_reason, updates[-1].stop_reason) == ("length" if stop is None else "stop", stop)
    assert all(update.finish_reason is None for update in updates[:-1])


@settings(max_examples=200)
@given(st.text("abc", max_size=12), st.lists(few_letters, min_size=1, max_size=3))
def test_no_more_is_held_back_than_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    update = _checker(stop=stops).feed(1, text)
    held_back = text[len(update.text) :]
    if update.finish_reason is None:
        assert held_back == "" or any(stop.startswith(held_back) for stop in stops)
