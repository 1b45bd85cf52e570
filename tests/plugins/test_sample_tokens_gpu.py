"""`sample_tokens` on a GPU over the released vocabulary: the tokens are those of the CPU body."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from qwen4exp_trt.plugins.registry import all_specs

pytestmark = pytest.mark.gpu

SPEC = all_specs()["sample_tokens"]
VOCAB, VOCAB_LIMIT = 248_320, 248_077
PARAMS = list(itertools.product((0.0, 0.7, 1.0), (0, 20), (0.8, 0.95, 1.0), (0.0, 0.02)))
"""Temperature, top-k, top-p, min-p."""


def peaked(rows: int, seed: int = 0) -> Tensor:
    """Logits like a language model's: a few tokens stand out."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2.5 * torch.randn(rows, VOCAB, generator=generator)
    likely = torch.randint(VOCAB, (rows, 40), generator=generator)
    return logits.scatter_add(1, likely, 14 * torch.rand(rows, 40, generator=generator))


def operands(logits: Tensor, params: Sequence[tuple[float, int, float, float]], seed: int = 0) -> list[Any]:
    temperatures, top_k, top_p, min_p = (torch.tensor(column) for column in zip(*params, strict=True))
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(-(2**63), 2**63 - 1, (len(params),), generator=generator)
    offsets = torch.randint(0, 100_000, (len(params),), generator=generator).int()
    return [logits, logits, temperatures, top_k.int(), top_p, min_p, seeds, offsets, VOCAB_LIMIT]


def check(args: list[Any]) -> None:
    moved = {id(arg): arg.cuda() for arg in args if isinstance(arg, Tensor)}  # the same tensor stays the same
    got = [output.cpu() for output in SPEC.overload(*[moved.get(id(arg), arg) for arg in args])]
    expected = SPEC.overload(*args)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[2], expected[2])
    torch.testing.assert_close(got[1], expected[1], rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_are_those_of_the_cpu(dtype: torch.dtype) -> None:
    check(operands(peaked(len(PARAMS)).to(dtype), PARAMS))


def test_flat_logits() -> None:
    """More tokens are kept than the list of candidates has room for."""
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    check(operands(logits, [(1.0, 0, 0.95, 0.0), (1.5, 5000, 0.9, 0.0), (1.0, 0, 1.0, 0.0), (1.0, 20, 0.95, 0.0)]))


def test_penalized_logits() -> None:
    args = operands(peaked(len(PARAMS)), PARAMS)
    args[1] = args[0] + torch.randint(0, 3, args[0].shape, generator=torch.Generator().manual_seed(2))
    check(args)


def test_unusable_rows() -> None:
    logits = peaked(6)
    logits[0, 5], logits[1, VOCAB - 1], logits[2], logits[3, :VOCAB_LIMIT] = (
        torch.nan,
        torch.inf,
        -torch.inf,
        -torch.inf,
    )
    for temperature in (0.0, 1.0):
        check(operands(logits, [(temperature, 20, 0.95, 0.0)] * 6))


def test_a_captured_step_follows_its_operands_and_rows_are_independent() -> None:
    rows = 64
    static = [arg.cuda() if isinstance(arg, Tensor) else arg for arg in operands(peaked(rows), [PARAMS[-1]] * rows)]
    static[1] = static[0]
    SPEC.overload(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = SPEC.overload(*static)
    params = (PARAMS * 2)[:rows]
    args = [arg.cuda() if isinstance(arg, Tensor) else arg for arg in operands(peaked(rows, 3), params, 3)]
    for target, value in zip(static[1:-1], args[1:-1], strict=True):
        target.copy_(value)
    graph.replay()
    for row in range(rows):
        alone = [arg[row : row + 1] if isinstance(arg, Tensor) else arg for arg in args]
        assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(SPEC.overload(*alone), outputs, strict=True))


def test_frequencies() -> None:
    """Of 20,000 draws over the ten likeliest tokens."""
    draws = 20_000
    logits = torch.full((1, 3000), -30.0, device="cuda")
    logits[0, 1000:1010] = torch.linspace(0, 3, 10, device="cuda")
    counts = torch.zeros(3000)
    for start in range(0, draws, 1000):
        rows = logits.repeat(1000, 1)
        ones = torch.ones(1000, device="cuda")
        offsets = torch.arange(start, start + 1000, device="cuda").int()
        seeds = torch.full((1000,), 7, device="cuda")
        none = torch.zeros(1000, device="cuda")
        tokens = SPEC.overload(rows, rows, ones, none.int(), ones * 0.9, none, seeds, offsets, 0)[0]
        counts += torch.bincount(tokens.long(), minlength=3000).cpu()
    probs = logits[0].cpu().softmax(-1)
    kept = probs >= probs.sort(descending=True).values[int((probs.sort(descending=True).values.cumsum(0) < 0.9).sum())]
    expected = torch.where(kept, probs, 0) / probs[kept].sum()
    assert ((counts / draws - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt() + 1e-9).all()
