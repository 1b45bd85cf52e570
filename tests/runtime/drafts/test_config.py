from __future__ import annotations

import pytest

from qwen4exp_trt.errors import RequestError
from qwen4exp_trt.runtime.drafts.config import SpeculativeConfig


@pytest.mark.parametrize("text", ["mtp:1", "mtp:3", "mtp:7", "ngram:4"])
def test_a_config_is_printed_as_it_is_written(text: str) -> None:
    config = SpeculativeConfig.parse(text)
    assert str(config) == text
    assert f"{config.method}:{config.num_speculative_tokens}" == text


@pytest.mark.parametrize(
    "text", ["", "mtp", "mtp:", "mtp:0", "mtp:8", "mtp:-1", "mtp:3.0", "mtp:³", "eagle:3", "ngram:4:2"]
)
def test_anything_else_is_refused_with_the_two_that_there_are(text: str) -> None:
    with pytest.raises(RequestError, match=r"speculative decoding is .*'mtp:K' .* 'ngram:K' .* from 1 to 7"):
        SpeculativeConfig.parse(text)


@pytest.mark.parametrize("count", [True, 2.0, None])
def test_the_count_is_an_integer(count: object) -> None:
    with pytest.raises(RequestError, match=f"'mtp' with {count} tokens"):
        SpeculativeConfig("mtp", count)  # pyright: ignore[reportArgumentType]
