"""The indexer's kernel on a GPU at released dims."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from indexer_streams import Streams
from op_checks import rms_error
from torch import Tensor

from qwen4exp_trt.plugins.registry import all_specs

pytestmark = pytest.mark.gpu
SPEC = all_specs()["qsa_indexer"]


def run(args: list[Any]) -> Tensor:
    return SPEC.overload(*args)


@pytest.mark.parametrize("most_rows", [1, 8])
def test_states_after_a_thousand_steps(most_rows: int) -> None:
    streams = Streams(4, 4200, device="cuda")
    lens, _ = streams.grow(run, 1000, most_rows, torch.Generator().manual_seed(most_rows))
    assert min(lens) > 200 and streams.error(lens) <= SPEC.tolerance[torch.bfloat16]


@pytest.mark.parametrize("count,rows", [(1, 1), (1, 8), (64, 1), (64, 8), (2, 1500)])
@pytest.mark.parametrize("context", [0, 1, 61])
def test_steps_of_any_size(count: int, rows: int, context: int) -> None:
    streams = Streams(count, context + rows, device="cuda")
    if context:
        run(streams.operands([0] * count, [context] * count, streams.states))
    args = streams.operands([context] * count, [rows] * count, streams.states)
    queries = run(args)
    assert streams.error([context + rows] * count) <= SPEC.tolerance[torch.bfloat16]
    on_cpu = [arg.cpu() if isinstance(arg, Tensor) else arg for arg in args]
    expected = SPEC.body(
        *[arg.float() if isinstance(arg, Tensor) and arg.is_floating_point() else arg for arg in on_cpu]
    )
    assert rms_error(expected, queries.cpu()) <= SPEC.tolerance[torch.bfloat16]


def test_angles_far_into_a_long_context() -> None:
    """Positions whose angles are hundreds of thousands of radians."""
    streams = Streams(3, 24, torch.float32, device="cuda")
    streams.positions += 262_144 - 24
    args = streams.operands([0] * 3, [24] * 3, streams.states)
    expected = SPEC.body(*[arg.cpu() if isinstance(arg, Tensor) else arg for arg in args])
    assert rms_error(expected, run(args).cpu()) <= SPEC.tolerance[torch.float32]
    assert streams.error([24] * 3) <= SPEC.tolerance[torch.float32]
