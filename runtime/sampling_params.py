"""What a request asks of sampling and stopping, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral, Real
from typing import Any, NoReturn, TypeGuard

from qwen4exp_trt.errors import RequestError

_GREEDY_BELOW = 1e-5

_NUMBERS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "temperature": ("a number from 0 (greedy) to 1e6", lambda value: 0 <= value <= 1e6),
    "top_p": ("a number above 0 and at most 1", lambda value: 0 < value <= 1),
    "min_p": ("a number from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("a number from 0.01 to 100", lambda value: 0.01 <= value <= 100),
    "presence_penalty": ("a number from -2 to 2", lambda value: -2 <= value <= 2),
}
_INTEGERS: dict[str, tuple[str, Callable[[int], bool]]] = {
    "top_k": ("an integer: 0 or -1 (off), or how many tokens to keep", lambda value: value >= -1),
}
_OPTIONAL_INTEGERS: dict[str, tuple[str, Callable[[int], bool]]] = {
    "seed": ("None or an integer from -2**63 to 2**64-1", lambda value: -(2**63) <= value < 2**64),
    "max_tokens": ("None (up to the longest sequence) or an integer of at least 1", lambda value: value >= 1),
    "logprobs": ("None or an integer of at least 0", lambda value: value >= 0),
}
_FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")


@dataclass(frozen=True)
class SamplingParams:
    """How to pick the next token and when to stop; the fields mean what they mean in vLLM.

    ``temperature`` 0 (anything below 1e-5) is greedy. ``top_k`` 0 or -1, ``top_p`` 1 and ``min_p`` 0 are off.
    ``repetition_penalty`` counts prompt and output tokens, ``presence_penalty`` output tokens only.
    ``stop`` (a string or several) and ``stop_token_ids`` are kept as tuples. ``max_tokens`` None means as many as
    the sequence has room for. ``logprobs`` is the number of most likely alternatives to report beside the sampled
    token. Raises RequestError naming the field, its value and the rule.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        for name, (rule, holds) in _NUMBERS.items():
            value = getattr(self, name)
            if not _is_number(value) or not holds(value):
                _refuse(name, value, rule)
            self._set(name, float(value))
        for name, (rule, holds) in (_INTEGERS | _OPTIONAL_INTEGERS).items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL_INTEGERS:
                continue
            if not _is_integer(value) or not holds(value):
                _refuse(name, value, rule)
            self._set(name, int(value))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                _refuse(name, getattr(self, name), "True or False")
        self._set("stop", _normalize_stop(self.stop))
        self._set("stop_token_ids", _normalize_token_ids(self.stop_token_ids))

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < _GREEDY_BELOW

    @cached_property
    def filters(self) -> tuple[float, int, float, float]:
        """What ``q4e::sample_tokens`` takes of this: temperature (0 if greedy), top-k, top-p and min-p."""
        return 0.0 if self.is_greedy else self.temperature, self.top_k, self.top_p, self.min_p

    @cached_property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0

    @property
    def has_filters(self) -> bool:
        """Whether top-k, top-p or min-p may drop a token."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _refuse(name: str, value: Any, rule: str) -> NoReturn:
    raise RequestError(f"SamplingParams.{name} is {value!r}; it must be {rule}")


def _normalize_stop(stop: Any) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else () if stop is None else stop
    is_valid = isinstance(strings, Sequence) and not isinstance(strings, bytes | bytearray)
    if not is_valid or not all(isinstance(string, str) and string for string in strings):
        _refuse("stop", stop, "None, a non-empty string or a sequence of non-empty strings")
    return tuple(strings)


def _normalize_token_ids(token_ids: Any) -> tuple[int, ...]:
    ids = () if token_ids is None else token_ids
    is_valid = isinstance(ids, Sequence) and not isinstance(ids, str | bytes | bytearray)
    if not is_valid or not all(_is_integer(token_id) and token_id >= 0 for token_id in ids):
        _refuse("stop_token_ids", token_ids, "None or a sequence of integers of at least 0")
    return tuple(int(token_id) for token_id in ids)
