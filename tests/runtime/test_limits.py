from __future__ import annotations

from typing import Any

import pytest

from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.runtime.limits import EngineLimits


def limits(**overrides: Any) -> EngineLimits:
    return EngineLimits(**{"max_batch_size": 4, "max_seq_len": 100, "prefill_chunk": 50, "block_size": 16} | overrides)


def test_derived_sizes() -> None:
    assert limits().blocks_per_seq == 7
    assert limits(max_seq_len=96).blocks_per_seq == 6
    assert limits().max_num_blocks == 28
    assert limits().num_slots == 4
    assert limits().max_logits_rows == limits().max_decode_tokens == 32
    assert limits().max_step_tokens == 50
    assert limits(prefill_chunk=20).max_step_tokens == 32, "a decode step of all sequences with drafts must fit"


@pytest.mark.parametrize("name", ["max_batch_size", "max_seq_len", "prefill_chunk", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "4", None, True, 2**31])
def test_only_integers_from_1_that_tensorrt_can_multiply(name: str, value: Any) -> None:
    with pytest.raises(BuildError, match=rf"^{name} is {value!r}; it must be an integer from 1 to \d+$"):
        limits(**{name: value})
