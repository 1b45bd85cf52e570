"""The kernels of a hyper-connection read in the emulator, at sizes that the ops' sample cases do not reach."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_emulator import run_emulated
from op_checks import as_tuple, clone, equal_bits, rms_error
from torch import Tensor

from qwen4exp_trt.plugins.hc_read import launch as hc_read_launch
from qwen4exp_trt.plugins.kernels import Plan
from qwen4exp_trt.plugins.registry import all_specs

SIZES: list[tuple[str, int, tuple[int, int, int]]] = [
    ("hc_project", 13, (4, 64, 32)),  # two tiles of tokens
    ("hc_project", 32, (2, 576, 20)),  # four; more chunks of columns than warps
    ("hc_project", 130, (2, 288, 32)),  # tiles through shared memory, and two blocks that share the columns
    ("hc_project", 33, (3, 160, 120)),  # several tiles of weight rows a warp
    ("hc_project", 40, (1, 64, 360)),  # two groups of weight rows
    ("hc_gate_mix", 8, (4, 50, 64)),  # columns that are no whole number of tiles
    ("hc_gate_mix", 75, (2, 16, 32)),  # two stages
    ("hc_gate_mix", 139, (4, 72, 32)),  # the kernel for many tokens: stages by turns, columns that are no whole block
    ("hc_gate_mix", 5, (8, 10, 96)),
    ("hc_gate_mix", 2, (1, 20, 64)),
    ("hc_read", 2, (4, 160, 64)),
    ("hc_read", 8, (2, 544, 32)),
    ("hc_read", 5, (1, 96, 32)),
]
"""Op, tokens, and (HC, hidden, rank)."""


def operands(op: str, tokens: int, sizes: tuple[int, int, int]) -> list[Any]:
    (hc_count, hidden, rank), generator = sizes, torch.Generator().manual_seed(tokens)
    width = hc_count * hidden

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * scale).bfloat16()

    values = {
        "stack": normal(tokens, width, scale=3),
        "normed": normal(tokens, width),
        "y": normal(tokens, hidden),
        "inject": normal(tokens, hc_count).abs(),
        "gain": 1 + normal(width, scale=0.2).float(),
        "weight": normal(rank + hc_count, width, scale=4 * width**-0.5),
        "up_weight": normal(width, rank, scale=3 * rank**-0.5),
        "lowrank": normal(tokens, rank),
        "hc_count": hc_count,
        "eps": 1e-6,
    }
    spec = all_specs()[op]
    return [values[name] for name in (*(arg.name for arg in spec.inputs), *(attr.name for attr in spec.attrs))]


def test_a_read_of_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams change inside a block's columns."""
    monkeypatch.setattr(hc_read_launch, "_MANY_TOKENS", 75)
    test_emulated_kernels_equal_the_body("hc_read", 75, (4, 64, 32))


@pytest.mark.parametrize("op,tokens,sizes", SIZES)
def test_emulated_kernels_equal_the_body(op: str, tokens: int, sizes: tuple[int, int, int]) -> None:
    spec, args = all_specs()[op], operands(op, tokens, sizes)
    expected = as_tuple(spec.body(*clone(args, upcast=True)))
    first, second = (run_emulated(spec, clone(args), reverse=reverse) for reverse in (False, True))
    for arg, right, one, other in zip(spec.outputs, expected, first, second, strict=True):
        assert rms_error(right, one) <= spec.tolerance[torch.bfloat16], arg.name
        assert equal_bits(one, other), arg.name


@pytest.mark.parametrize("op", ["hc_project", "hc_read"])
def test_scratch_never_shrinks(op: str) -> None:
    """TensorRT asks for the workspace at the largest shapes and runs any smaller ones in it."""
    for smaller, larger in zip(plans(op, 48), plans(op, 132), strict=True):
        assert smaller.scratch_bytes <= larger.scratch_bytes
    sizes = [plan.scratch_bytes for plan in plans(op, 132)]
    assert sizes == sorted(sizes)


def plans(op: str, num_sms: int) -> list[Plan]:
    """At released sizes, for growing numbers of tokens."""
    width, hidden, rank, hc_count = 10240, 2560, 320, 4
    shapes = {"y": hidden, "inject": hc_count, "stack": width, "normed": width}
    weights = {"gain": [width], "weight": [rank + hc_count, width], "up_weight": [width, rank]}
    spec, found = all_specs()[op], []
    dtypes = {arg.name: torch.float32 if arg.dtype == "float32" else torch.bfloat16 for arg in spec.inputs}
    for tokens in (1, 2, 7, 8, 9, 16, 31, 32, 33, 63, 64, 65, 100, 700, 1023, 1024, 2047, 2048, 6000, 16384):
        operands = {arg.name: weights.get(arg.name) or [tokens, shapes[arg.name]] for arg in spec.inputs}
        attrs = {"hc_count": hc_count} if op == "hc_project" else {"eps": 1e-6}
        found.append(spec.plan(operands, dtypes, attrs, num_sms))
    return found
