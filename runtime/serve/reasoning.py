"""Splits a model's output into its reasoning and its answer, while it comes."""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

OPEN, CLOSE = "<think>", "</think>"


class SplitText(NamedTuple):
    """What a piece of output added to the reasoning and to the answer."""

    reasoning: str
    answer: str


class _Place(Enum):
    UNDECIDED = auto()
    """Nothing but what may begin `OPEN` has come."""
    REASONING = auto()
    GAP = auto()
    """Behind `CLOSE`, before the first character of the answer."""
    ANSWER = auto()


class ReasoningSplitter:
    """The output up to ``</think>`` is reasoning, the rest is the answer; the cuts between pieces do not matter.

    ``prompt`` decides where the output begins: inside a block that the prompt has opened, behind one that it has
    closed, or before any, where the output may open one itself. White space around the reasoning and line breaks before
    the answer belong to the template, and are dropped. Output without a block is the answer as it is.
    """

    def __init__(self, prompt: str) -> None:
        end = prompt.rstrip()
        self._held = ""
        self._has_reasoning = False
        self.starts_inside: bool | None = True if end.endswith(OPEN) else False if end.endswith(CLOSE) else None
        """None: the prompt leaves it to the output."""
        places = {True: _Place.REASONING, False: _Place.ANSWER, None: _Place.UNDECIDED}
        self._place = places[self.starts_inside]

    def feed(self, text: str) -> SplitText:
        """Take the next piece of the output."""
        text = self._held + text
        self._held = ""
        reasoning = ""
        if self._place is _Place.UNDECIDED:
            text = self._decide(text)
        if self._place is _Place.REASONING:
            reasoning, text = self._reason(text)
        if self._place is _Place.GAP:
            text = text.lstrip("\r\n")
            self._place = _Place.ANSWER if text else _Place.GAP
        return SplitText(reasoning, text)

    def finish(self) -> SplitText:
        """The output has ended: what was held back."""
        held, self._held = self._held, ""
        if self._place is _Place.REASONING:
            return SplitText(held.rstrip(), "")
        return SplitText("", held)

    def _decide(self, text: str) -> str:
        start = text.lstrip()
        if start.startswith(OPEN):
            self._place = _Place.REASONING
            return start.removeprefix(OPEN)
        if OPEN.startswith(start):
            self._held = text
            return ""
        self._place = _Place.ANSWER
        return text

    def _reason(self, text: str) -> tuple[str, str]:
        """The reasoning that is certain, and what follows its end."""
        if not self._has_reasoning:
            text = text.lstrip()
        before, close, after = text.partition(CLOSE)
        if close:
            self._place = _Place.GAP
            return before.rstrip(), after
        certain = before[: len(before) - num_undecided(before, CLOSE)].rstrip()
        self._held = before[len(certain) :]
        self._has_reasoning = self._has_reasoning or bool(certain)
        return certain, ""


def num_undecided(text: str, tag: str) -> int:
    """How many characters at the end of ``text`` may begin ``tag``, which it does not hold."""
    longest = min(len(tag) - 1, len(text))
    return next((length for length in range(longest, 0, -1) if tag.startswith(text[-length:])), 0)
