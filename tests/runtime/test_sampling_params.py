from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from qwen4exp_trt.errors import RequestError
from qwen4exp_trt.runtime.sampling_params import SamplingParams


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert (params.repetition_penalty, params.presence_penalty, params.seed) == (1.0, 0.0, None)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == ((), (), False)
    assert (params.max_tokens, params.logprobs) == (16, None)
    assert params.skip_special_tokens and not params.include_stop_str_in_output
    assert not (params.is_greedy or params.has_penalties or params.has_filters)


@pytest.mark.parametrize(
    ("stop", "kept"),
    [(None, ()), ("a", ("a",)), (["a", "bc"], ("a", "bc")), (("a",), ("a",)), ([], ())],
)
def test_stop_is_kept_as_a_tuple(stop: Any, kept: tuple[str, ...]) -> None:
    assert SamplingParams(stop=stop).stop == kept


def test_numbers_are_kept_as_plain_python_numbers() -> None:
    fields: dict[str, Any] = {"temperature": np.float32(0.5), "top_p": 1, "top_k": np.int64(3), "seed": np.int64(1)}
    params = SamplingParams(**fields, stop_token_ids=[np.int32(7)])  # type: ignore[list-item]
    kept = [params.temperature, params.top_p, params.top_k, params.seed, *(params.stop_token_ids or ())]
    assert kept == [0.5, 1.0, 3, 1, 7]
    assert [type(value) for value in kept] == [float, float, int, int, int]


def test_params_are_frozen_hashable_and_comparable() -> None:
    params = SamplingParams(stop=["a"], stop_token_ids=[1])
    with pytest.raises(FrozenInstanceError):
        params.top_k = 3  # type: ignore[misc]
    assert {params: 1}[SamplingParams(stop="a", stop_token_ids=(1,))] == 1


@pytest.mark.parametrize(
    ("fields", "is_greedy", "has_penalties", "has_filters"),
    [
        ({"temperature": 0}, True, False, False),
        ({"temperature": 9e-6}, True, False, False),
        ({"temperature": 1e-5}, False, False, False),
        ({"repetition_penalty": 1.1}, False, True, False),
        ({"presence_penalty": -0.5}, False, True, False),
        ({"top_k": -1}, False, False, False),
        ({"top_k": 1}, False, False, True),
        ({"top_p": 0.9}, False, False, True),
        ({"min_p": 0.1}, False, False, True),
    ],
)
def test_what_is_switched_on(fields: dict[str, Any], is_greedy: bool, has_penalties: bool, has_filters: bool) -> None:
    params = SamplingParams(**fields)
    assert (params.is_greedy, params.has_penalties, params.has_filters) == (is_greedy, has_penalties, has_filters)


_NAN, _INF = float("nan"), float("inf")
_REFUSED: dict[str, list[Any]] = {
    "temperature": [-0.1, _NAN, _INF, 1e7, "1", None, True],
    "top_p": [0, 1.01, -1, _NAN, "0.9", None, False],
    "min_p": [-0.01, 1.01, _NAN, None, True],
    "repetition_penalty": [0, -1, 1000, _NAN, _INF, None, True],
    "presence_penalty": [-2.1, 2.1, _NAN, "0", None, False],
    "top_k": [-2, 1.0, "5", None, True],
    "seed": [1.5, "1", True, 2**64, -(2**63) - 1],
    "max_tokens": [0, -1, 2.0, "16", True],
    "logprobs": [-1, 1.0, "5", True],
    "ignore_eos": [1, None, "yes"],
    "skip_special_tokens": [0],
    "include_stop_str_in_output": ["no"],
    "stop": ["", [""], ["a", ""], [1], 5, b"a", {"a"}, [None]],
    "stop_token_ids": [5, "12", [-1], [1.0], [True], [None], {3}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in _REFUSED.items() for value in values])
def test_refusal_names_field_value_and_rule(name: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"SamplingParams.{name} is {value!r}; it must be ")
    assert "\n" not in message


@pytest.mark.parametrize("fields", [{"seed": 2**64 - 1}, {"seed": -(2**63)}, {"max_tokens": None}, {"logprobs": 0}])
def test_limits_are_accepted(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    assert {name: getattr(params, name) for name in fields} == fields
