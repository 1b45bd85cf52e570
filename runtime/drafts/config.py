"""Which drafts a model gets, and how many: ``--speculate``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from qwen4exp_trt.errors import RequestError
from qwen4exp_trt.runtime.limits import DRAFT_ROWS

Method = Literal["mtp", "ngram"]
MAX_DRAFTS = DRAFT_ROWS - 1
"""Of a sequence in a step: its rows are those and its last token's."""

_SYNTAX = f"'mtp:K' (the checkpoint's draft head) or 'ngram:K' (prompt lookup), with K from 1 to {MAX_DRAFTS}"


@dataclass(frozen=True)
class SpeculativeConfig:
    """``method``: ``mtp``, the checkpoint's draft head, or ``ngram``, what followed the last tokens where they stood
    before. ``num_speculative_tokens``: drafts of a sequence in a step, 1 to 7. Raises RequestError for others."""

    method: Method
    num_speculative_tokens: int

    def __post_init__(self) -> None:
        count = self.num_speculative_tokens
        is_count = isinstance(count, int) and not isinstance(count, bool) and 1 <= count <= MAX_DRAFTS
        if self.method not in get_args(Method) or not is_count:
            raise RequestError(f"speculative decoding is {self.method!r} with {count!r} tokens; it must be {_SYNTAX}")

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig:
        """From ``"mtp:3"`` or ``"ngram:4"``; RequestError for anything else."""
        method, separator, count = text.partition(":")
        if method not in get_args(Method) or not separator or not (count.isascii() and count.isdecimal()):
            raise RequestError(f"speculative decoding is {text!r}; it must be {_SYNTAX}")
        return cls(method, int(count))  # pyright: ignore[reportArgumentType]

    def __str__(self) -> str:
        return f"{self.method}:{self.num_speculative_tokens}"
