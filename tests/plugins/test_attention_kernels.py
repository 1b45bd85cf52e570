"""`qsa_attention`'s kernels in the emulator where the sample cases do not lead them: splits, many heads, odd sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_operands import FP8, Attention, attention_operands, check_attention
from kernel_emulator import run_emulated
from torch import Tensor

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.kernels import Plan
from qwen4exp_trt.plugins.qsa_attention.launch import num_splits
from qwen4exp_trt.plugins.registry import all_specs

SPEC = all_specs()["qsa_attention"]
NAMES = [*(arg.name for arg in SPEC.inputs), *(attr.name for attr in SPEC.attrs)]
SMALL = Attention(heads=6, kv_heads=2, head_dim=64, half=8, section=(3, 3, 2), budget=96, page=16)


def check(operands: dict[str, Any], num_sms: int) -> None:
    def run(given: dict[str, Any]) -> Tensor:
        return run_emulated(SPEC, [given[name] for name in NAMES], num_sms=num_sms)[0]

    check_attention(operands, run, SPEC.tolerance[operands["qkv"].dtype])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
def test_any_number_of_splits(cache_dtype: torch.dtype) -> None:
    for num_sms in (1, 5, 64):
        check(attention_operands(SMALL, [2, 1], [115, 30], generator(), cache_dtype=cache_dtype), num_sms)


def test_any_number_of_splits_in_float32() -> None:
    for num_sms in (1, 64):
        check(attention_operands(SMALL, [2, 1], [99, 30], generator(), torch.float32, torch.float32), num_sms)


ODD = {
    "released heads": Attention(budget=28),
    "one key head, groups of three": Attention(3, 1, 128, half=16, section=(6, 5, 5), budget=36, ratio=3, page=12),
    "more heads than a tile": Attention(heads=40, kv_heads=2, head_dim=32, half=4, section=(2, 1, 1), budget=24),
    "wide heads": Attention(heads=2, kv_heads=1, head_dim=328, half=40, section=(14, 13, 13), budget=16),
    "narrow heads": Attention(heads=4, kv_heads=4, head_dim=8, half=4, section=(2, 1, 1), budget=24, page=16),
    "dense": Attention(heads=6, kv_heads=2, head_dim=64, half=8, section=(3, 3, 2), ratio=0, page=16),
}


@pytest.mark.parametrize("attention", ODD.values(), ids=ODD.keys())
def test_odd_sizes(attention: Attention) -> None:
    check(attention_operands(attention, [1, 2], [69, 3], generator(), padding_seqs=1, padding_rows=1), num_sms=12)


def plan_of(operands: dict[str, Any], num_sms: int, **shapes: list[int]) -> Plan:
    tensors = {arg.name: operands[arg.name] for arg in SPEC.inputs}
    attrs = {attr.name: operands[attr.name] for attr in SPEC.attrs}
    all_shapes = {name: list(tensor.shape) for name, tensor in tensors.items()} | shapes
    return SPEC.plan(all_shapes, {name: tensor.dtype for name, tensor in tensors.items()}, attrs, num_sms)


def workspace(ratio: int, tokens: int, num_sms: int) -> int:
    operands = attention_operands(replace(SMALL, ratio=ratio), [1], [5], generator())
    shapes = {"qkv": [tokens, operands["qkv"].shape[1]], "positions": [3, tokens]}
    shapes |= {"selected_groups": [tokens if ratio else 1, 512], "block_table": [1, 4096]}
    return plan_of(operands, num_sms, **shapes).scratch_bytes


@pytest.mark.parametrize("ratio", [0, 4])
def test_the_workspace_of_the_largest_step_is_enough_for_all(ratio: int) -> None:
    for num_sms in (4, 48, 132):
        sizes = [workspace(ratio, tokens, num_sms) for tokens in (*range(1, 140), 1000)]
        assert sizes == sorted(sizes)
        assert sizes[-1] >= workspace(ratio, 1000, num_sms - 1)


def test_splits_cover_all_tiles_with_as_many_blocks_as_wanted() -> None:
    for rows, tiles, num_sms in ((1, 65, 132), (1, 65, 48), (8, 65, 132), (64, 65, 48), (1, 1, 48)):
        splits = num_splits(rows, 2, tiles, num_sms)
        assert 1 <= splits <= tiles
        longest = -(-tiles // splits)
        assert -(-tiles // longest) == splits, "no split is empty"


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (Attention(heads=2, kv_heads=1, head_dim=20, half=4), "head_dim is 20, expected a multiple of 8 up to 512"),
        (Attention(heads=2, kv_heads=1, head_dim=16, half=9), "9 frequencies rotate 18 dims, but head_dim is 16"),
        (Attention(heads=5, kv_heads=2, head_dim=16, half=4), "5 query heads are no multiple of 2 key heads"),
    ],
)
def test_impossible_sizes_are_refused(attention: Attention, message: str) -> None:
    with pytest.raises(PluginError, match=message):
        plan_of(attention_operands(attention, [1], [3], generator()), 4)
