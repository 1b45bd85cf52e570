"""`qsa_attention`'s tiles of neighbouring rows, in the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_operands import FP8, Attention, attention_operands, check_attention
from kernel_emulator import run_emulated
from torch import Tensor

from qwen4exp_trt.plugins.qsa_attention import tiles
from qwen4exp_trt.plugins.registry import all_specs

SPEC = all_specs()["qsa_attention"]
NAMES = [*(arg.name for arg in SPEC.inputs), *(attr.name for attr in SPEC.attrs)]
SMALL = Attention(heads=6, kv_heads=2, head_dim=64, half=8, section=(3, 3, 2), budget=48, page=16)


@pytest.fixture(autouse=True)
def tiles_of_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "FEWEST_ROWS", 1)
    monkeypatch.setattr(tiles, "FEWEST_ROWS_PER_SEQUENCE", 1)


def check(operands: dict[str, Any], reverse: bool = False) -> None:
    def run(given: dict[str, Any]) -> Tensor:
        return run_emulated(SPEC, [given[name] for name in NAMES], reverse)[0]

    check_attention(operands, run, SPEC.tolerance[torch.bfloat16])


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, FP8])
@pytest.mark.parametrize("tile_cost", [1, 2, 100])
def test_tiles_rows_and_both(monkeypatch: pytest.MonkeyPatch, cache_dtype: torch.dtype, tile_cost: int) -> None:
    monkeypatch.setattr(tiles, "TILE_COST", tile_cost)
    generator = torch.Generator().manual_seed(0)
    operands = attention_operands(SMALL, [1, 14, 2], [70, 45, 3], generator, cache_dtype=cache_dtype, padding_seqs=1)
    check(operands, reverse=tile_cost == 2)


def test_dense() -> None:
    attention = Attention(heads=2, kv_heads=1, head_dim=48, half=8, section=(3, 3, 2), ratio=0, page=16)
    check(attention_operands(attention, [13, 1], [37, 0], torch.Generator().manual_seed(0), padding_rows=2))


def test_windows_of_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """More groups than are sorted at once."""
    monkeypatch.setattr(tiles, "WINDOW", 512)
    monkeypatch.setattr(tiles, "TILE_COST", 1)
    attention = Attention(heads=2, kv_heads=1, head_dim=16, half=4, section=(2, 1, 1), budget=32, page=16)
    check(attention_operands(attention, [5], [4200], torch.Generator().manual_seed(0)))
