"""What `qsa_attention` writes into an FP8 cache and reads from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.qsa_attention.cases import HKV, D
from qwen4exp_trt.plugins.registry import all_specs

FP8 = torch.float8_e4m3fn
Q4E: Any = torch.ops.q4e


def sample(dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Four sequences of one new token each."""
    (case,) = (case for case in all_specs()["qsa_attention"].cases if case.name == "decode, FP8 cache")
    return case.make(dtype, torch.Generator().manual_seed(0))


def stored(case: dict[str, Any], which: int) -> Tensor:
    """What the cache holds of the new tokens, float32 ``[B, HKV, D]``."""
    cache = case["kv_cache"]
    places = [(int(case["block_table"][b, p // 16]), p % 16) for b, p in enumerate((case["seq_lens"] - 1).tolist())]
    return torch.stack([cache[block, which, row].float() for block, row in places])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_rounded_to_even_and_saturate(dtype: torch.dtype) -> None:
    case = sample(dtype)
    values = [17.0, 19.0, -17.0, 448.0, 464.0, 480.0, -3e4, 2.0**-10, 3 * 2.0**-10, 0.0]
    expected = [16.0, 20.0, -16.0, 448.0, 448.0, 448.0, -448.0, 0.0, 2.0**-8, 0.0]
    case["qkv"][:, -HKV * D :] = torch.tensor(values).repeat(5)[: HKV * D]
    Q4E.qsa_attention(**case)
    assert stored(case, 1).flatten(1).tolist() == [(expected * 5)[: HKV * D]] * 4


def test_keys_are_rounded_once() -> None:
    """Not to BF16 first: what is stored of BF16 operands is what is stored of the same operands in float32."""
    case = sample(torch.bfloat16)
    exact = case | {"qkv": case["qkv"].float(), "kv_cache": case["kv_cache"].clone()}
    for operands in (case, exact):
        Q4E.qsa_attention(**operands)
    assert torch.equal(case["kv_cache"].view(torch.uint8), exact["kv_cache"].view(torch.uint8))


def test_what_is_stored_is_read_back_exactly() -> None:
    """New tokens of zero keys and E4M3 values lose nothing: bit by bit the attention over a float32 cache."""
    case = sample()
    k, v = case["qkv"][:, -2 * HKV * D :].chunk(2, -1)
    k.zero_()
    v.copy_(v.to(FP8).float())
    over_floats = case | {"kv_cache": case["kv_cache"].float()}
    assert torch.equal(Q4E.qsa_attention(**case), Q4E.qsa_attention(**over_floats))
    assert torch.equal(case["kv_cache"].float(), over_floats["kv_cache"])


def test_another_dtype_is_refused() -> None:
    case = sample(torch.bfloat16)
    case["kv_cache"] = case["kv_cache"].half()
    message = r"operand kv_cache is torch\.float16, expected torch\.bfloat16 or torch\.float8_e4m3fn"
    with pytest.raises(PluginError, match=message):
        Q4E.qsa_attention(**case)
