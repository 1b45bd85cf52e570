"""When one request's output ends, and which of its text may be shown before that is known."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from qwen4exp_trt.runtime.sampling_params import SamplingParams

FinishReason = Literal["stop", "length", "abort", "error"]
"""A stop token or string, the longest length, or somebody who did not want the rest."""


@dataclass(slots=True)  # not frozen: there is one a token
class StopUpdate:
    """The text to show after one token and, with the last token, why the output ends.

    ``stop_reason`` is the stop string, or the id of the stop or eos token, when ``finish_reason`` is ``stop``.
    """

    text: str
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class StopChecker:
    """Stop tokens, stop strings and lengths of one request.

    Text that may turn out to begin a stop string is held back, so that the shown text never has a part of one. Of
    several stop strings the one that is complete first ends the output (the longest of those complete at once),
    however the text is cut into pieces. A stop token wins over a stop string, and that over the length.

    ``eos_token_ids`` end the output unless ``SamplingParams.ignore_eos``. ``max_seq_len`` bounds prompt and output
    together and must leave room for one token.
    """

    def __init__(
        self, params: SamplingParams, eos_token_ids: Collection[int], num_prompt_tokens: int, max_seq_len: int
    ) -> None:
        room = max_seq_len - num_prompt_tokens
        assert room > 0, f"{num_prompt_tokens} prompt tokens leave no room in a sequence of {max_seq_len}"
        self._num_left = room if params.max_tokens is None else min(room, params.max_tokens)
        self._stop_token_ids = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_token_ids)}
        self._stop_strings = tuple(params.stop or ())
        self._include_stop = params.include_stop_str_in_output
        self._held_back = ""
        self._is_finished = False

    def feed(self, token_id: int, new_text: str) -> StopUpdate:
        """Take the next token and the text that it completed.

        When the result's ``finish_reason`` is ``length``, the detokenizer's ``flush()`` belongs behind its text; after
        a stop nothing does. The text of a stop token is shown only with ``include_stop_str_in_output``.
        """
        assert not self._is_finished, "the output has ended"
        self._num_left -= 1
        if token_id in self._stop_token_ids:
            return self._finish(self._held_back + (new_text if self._include_stop else ""), "stop", token_id)
        if not self._stop_strings and self._num_left:
            return StopUpdate(new_text)
        text = self._held_back + new_text
        match = self._first_match(text)
        if match is not None:
            end, stop = match
            return self._finish(text[: end if self._include_stop else end - len(stop)], "stop", stop)
        if self._num_left == 0:
            return self._finish(text, "length", None)
        num_shown = len(text) - self._num_undecided(text)
        self._held_back = text[num_shown:]
        return StopUpdate(text[:num_shown])

    def _finish(self, text: str, finish_reason: FinishReason, stop_reason: int | str | None) -> StopUpdate:
        self._is_finished = True
        return StopUpdate(text, finish_reason, stop_reason)

    def _first_match(self, text: str) -> tuple[int, str] | None:
        """End and string of the stop string that is complete first."""
        matches = [(text.find(stop) + len(stop), stop) for stop in self._stop_strings if stop in text]
        return min(matches, key=lambda match: (match[0], -len(match[1])), default=None)

    def _num_undecided(self, text: str) -> int:
        """How many characters at the end of ``text`` may begin a stop string."""
        longest = max((len(stop) for stop in self._stop_strings), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stop_strings):
                return length
        return 0
