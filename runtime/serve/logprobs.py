"""Log-probabilities in the forms of the two endpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qwen4exp_trt.runtime.outputs import Logprob, StreamChunk
from qwen4exp_trt.runtime.tokenizer import Tokenizer

_LOWEST = -9999.0
"""In the place of minus infinity, which JSON does not have."""


def shown_logprobs(chunk: StreamChunk) -> list[tuple[int, dict[int, Logprob]]]:
    """Each token of the chunk with its entry, without the stop token that ended the output: it has no text."""
    entries = list(zip(chunk.token_ids, chunk.logprobs or (), strict=False))
    return entries[:-1] if isinstance(chunk.stop_reason, int) else entries


def chat_logprobs(
    entries: Sequence[tuple[int, dict[int, Logprob]]], num_top: int, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """The ``content`` of a chat choice's ``logprobs``."""

    def token(token_id: int, logprob: Logprob) -> dict[str, Any]:
        text = logprob.decoded_token or ""
        return {"token": text, "logprob": max(logprob.logprob, _LOWEST), "bytes": list(tokenizer.token_bytes(token_id))}

    return [
        {**token(token_id, entry[token_id]), "top_logprobs": [token(*pair) for pair in _best(entry, num_top)]}
        for token_id, entry in entries
    ]


class CompletionLogprobs:
    """The ``logprobs`` of a completion, piece by piece: offsets go on where the last piece ended."""

    def __init__(self, num_top: int) -> None:
        self._num_top, self._offset = num_top, 0

    def body(self, entries: Sequence[tuple[int, dict[int, Logprob]]]) -> dict[str, Any]:
        """The next tokens. ``text_offset`` counts characters of the tokens' own texts."""
        tokens = [entry[token_id].decoded_token or "" for token_id, entry in entries]
        offsets = []
        for text in tokens:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": [max(entry[token_id].logprob, _LOWEST) for token_id, entry in entries],
            "top_logprobs": [_by_text(_best(entry, self._num_top)) for _, entry in entries],
            "text_offset": offsets,
        }


def _best(entry: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """The ``count`` most likely tokens, best first."""
    return sorted(entry.items(), key=lambda pair: pair[1].rank)[:count]


def _by_text(best: Sequence[tuple[int, Logprob]]) -> dict[str, float]:
    """Of tokens with one text, such as parts of characters, the most likely one."""
    found: dict[str, float] = {}
    for _, logprob in best:
        found.setdefault(logprob.decoded_token or "", max(logprob.logprob, _LOWEST))
    return found
