"""Sequences of steps through the indexer: groups across steps, rings that wrap, rejections; by the emulator."""

from __future__ import annotations

import pytest
import torch
from indexer_streams import Streams
from kernel_emulator import run_emulated
from op_checks import equal_bits

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.qsa_indexer import SPEC

SMALL = {"heads": 2, "dim": 20, "half": 7, "section": (3, 2, 2), "page": 3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("most_rows", [1, 8, 30])
def test_states_after_many_steps(dtype: torch.dtype, most_rows: int) -> None:
    ends = []
    for reverse in (False, True):
        streams, generator = Streams(3, 90, dtype, **SMALL), torch.Generator().manual_seed(most_rows)
        lens, _ = streams.grow(lambda args: run_emulated(SPEC, args, reverse)[0], 40, most_rows, generator)  # noqa: B023
        assert max(lens) > 10 and streams.error(lens) <= SPEC.tolerance[dtype]
        ends.append(streams.states)
    assert all(equal_bits(first, second) for first, second in zip(*ends, strict=True))


def test_a_step_of_padding_alone_changes_no_state() -> None:
    streams = Streams(2, 30, **SMALL)
    args = streams.operands([0, 0], [2, 2], [torch.zeros_like(state) for state in streams.states])
    for index, value in ((8, 0), (9, 0), (11, -1), (12, 0)):
        args[index].fill_(value)
    run_emulated(SPEC, args)
    assert not any(state.any() for state in args[5:8])


def test_impossible_rotation_is_refused() -> None:
    streams = Streams(1, 8, **{**SMALL, "half": 11})
    with pytest.raises(PluginError, match="D=20, R=11"):
        run_emulated(SPEC, streams.operands([0], [2], streams.states))
