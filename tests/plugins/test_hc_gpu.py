"""The kernels of a hyper-connection read on a GPU, at released and at odd sizes, against the CPU bodies in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_checks import as_tuple, clone, equal_bits, rms_error
from torch import Tensor

from qwen4exp_trt.plugins.registry import all_specs

pytestmark = pytest.mark.gpu

RELEASED = (4, 2560, 320)
ODD = [(4, 2592, 352), (2, 96, 32), (8, 64, 64), (1, 160, 384), (4, 130, 64), (3, 100, 20)]
"""HC, hidden, rank: with remainders of every tile, and the last two without a tensor core."""
TOKENS = [1, 2, 3, 4, 7, 8, 9, 16, 25, 32, 33, 64, 100, 1025, 3001]


def operands(op: str, tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> list[Any]:
    """Random operands of ``op`` on the GPU, by position."""
    (hc_count, hidden, rank), generator = sizes, torch.Generator("cuda").manual_seed(tokens)
    width = hc_count * hidden

    def normal(*shape: int, scale: float = 1.0, to: torch.dtype = dtype) -> Tensor:
        return (torch.randn(*shape, device="cuda", generator=generator) * scale).to(to)

    values = {
        "stack": normal(tokens, width, scale=3),
        "normed": normal(tokens, width),
        "y": normal(tokens, hidden),
        "inject": normal(tokens, hc_count).abs(),
        "gain": 1 + normal(width, scale=0.2, to=torch.float32),
        "weight": normal(rank + hc_count, width, scale=4 * width**-0.5),
        "up_weight": normal(width, rank, scale=3 * rank**-0.5),
        "lowrank": normal(tokens, rank),
        "gate_logits": normal(tokens, width, scale=3),
        "hc_count": hc_count,
        "eps": 1e-6,
    }
    spec = all_specs()[op]
    return [values[name] for name in (*(arg.name for arg in spec.inputs), *(attr.name for attr in spec.attrs))]


def check(op: str, tokens: int, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Two runs on memory full of NaN: both within the op's tolerance, and bitwise the same."""
    spec, args = all_specs()[op], operands(op, tokens, sizes, dtype)
    expected = as_tuple(spec.body(*clone(args, upcast=True)))
    runs = []
    for _ in range(2):
        poison = [torch.full((tokens * sizes[0] * sizes[1] + 4096,), torch.nan, device="cuda") for _ in range(3)]
        del poison
        runs.append(as_tuple(spec.overload(*args)))
    for arg, right, first, second in zip(spec.outputs, expected, *runs, strict=True):
        assert rms_error(right, first) <= spec.tolerance[dtype], arg.name
        assert equal_bits(first, second), arg.name


OPS = ["hc_norm", "hc_combine_norm", "hc_mix", "hc_project", "hc_gate_mix", "hc_read"]


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("op", OPS)
def test_released_sizes(op: str, tokens: int) -> None:
    check(op, tokens, RELEASED, torch.bfloat16)


@pytest.mark.parametrize("sizes", ODD)
@pytest.mark.parametrize("op", OPS)
def test_odd_sizes(op: str, sizes: tuple[int, int, int]) -> None:
    for tokens in (3, 13, 40):
        check(op, tokens, sizes, torch.bfloat16)


@pytest.mark.parametrize("op", OPS)
def test_float32(op: str) -> None:
    for tokens in (1, 9, 50):
        check(op, tokens, RELEASED, torch.float32)


@pytest.mark.parametrize("width", [2560, 10240])
def test_norm_of_the_draft_head(width: int) -> None:
    """One group for the whole row."""
    for tokens in (1, 9, 300):
        check("hc_norm", tokens, (1, width, 320), torch.bfloat16)


def test_many_reads_in_one_graph() -> None:
    """Kernels that start before the last one has ended still see all of its results."""
    args = [operands("hc_read", 2, RELEASED, torch.bfloat16) for _ in range(12)]
    for read, weights in enumerate(args):
        weights[4], weights[5] = weights[4].roll(read, 0), weights[5].roll(read, 0)

    def chain() -> list[Tensor]:
        state, outputs = args[0][:3], []
        for _, _, _, *weights in args:
            state = torch.ops.q4e.hc_read(*state, *weights)
            outputs += [output.clone() for output in state]
        return outputs

    one_by_one, graph = chain(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        replayed = chain()
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert all(equal_bits(*pair) for pair in zip(one_by_one, replayed, strict=True))
