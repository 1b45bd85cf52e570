"""`sample_tokens` beyond its sample cases: its noise, its body and its kernels on more than one chunk of ids."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from kernel_emulator import run_emulated
from torch import Tensor

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.sample_tokens.noise import exponential_noise, philox
from qwen4exp_trt.plugins.sample_tokens.reference import exponential

SPEC = all_specs()["sample_tokens"]
OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def operands(logits: Tensor, rows: list[dict[str, Any]], vocab_limit: int = 0, seed: int = 0) -> list[Any]:
    """Row i of ``logits`` with the parameters of ``rows[i]``, `OFF` by default."""
    filled = [OFF | row for row in rows]
    generator = torch.Generator().manual_seed(seed)
    return [
        logits,
        logits,
        torch.tensor([float(row["temperature"]) for row in filled]),
        torch.tensor([row["top_k"] for row in filled], dtype=torch.int32),
        torch.tensor([float(row["top_p"]) for row in filled]),
        torch.tensor([float(row["min_p"]) for row in filled]),
        torch.randint(-(2**63), 2**63 - 1, (len(rows),), generator=generator),
        torch.randint(0, 1000, (len(rows),), generator=generator).int(),
        vocab_limit,
    ]


def normal(rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


# Noise


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_its_published_words(counter: tuple[int, ...], key: tuple[int, int], words: str) -> None:
    a, b, c, d = (torch.tensor([word]) for word in counter)
    assert " ".join(f"{int(word):08x}" for word in philox((a, b, c, d), key)) == words


def test_noise_is_exponential_and_depends_on_seed_draw_and_token() -> None:
    ids = torch.arange(200_000)
    first = exponential_noise(2**64 - 5, 7, ids)
    assert abs(first.mean() - 1) < 0.01 and abs(first.var() - 1) < 0.03 and (first > 0).all()
    for seed, offset in ((5, 7), (2**64 - 5, 8), (-5 + 2**32, 7)):
        assert abs(torch.corrcoef(torch.stack([first, exponential_noise(seed, offset, ids)]))[0, 1]) < 0.01
    assert torch.equal(exponential_noise(-5, 7, ids), first), "a seed is 64 bits, signed or not"
    assert torch.allclose(first[:40], torch.tensor([exponential(-5, i, 7) for i in range(40)]), rtol=1e-6)


# The body


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, 5),
        ({"temperature": 2.0}, 5),
        ({"top_k": 2}, 3),  # the second and the third tie
        ({"top_p": 0.6}, 3),
        ({"min_p": 0.5}, 1),
        ({"top_k": 4, "top_p": 0.9, "min_p": 0.1}, 3),
    ],
)
def test_frequencies_follow_the_filtered_softmax(params: dict[str, Any], kept: int) -> None:
    logits = torch.tensor([1.0, 2.0, 1.0, -1.0, 0.0])
    draws = 800
    args = operands(logits.expand(draws, -1), [params] * draws)
    frequencies = torch.bincount(SPEC.overload(*args)[0].long(), minlength=5) / draws
    best = (logits / params.get("temperature", 1.0)).sort(descending=True)
    expected = torch.zeros(5).scatter(0, best.indices[:kept], best.values[:kept].softmax(0))
    assert ((frequencies - expected).abs() <= 5 * (expected * (1 - expected) / draws).sqrt()).all()


def test_the_rank_and_the_logprob_are_of_the_raw_logits() -> None:
    args = operands(torch.tensor([[0.0, 5.0, 1.0, 9.0]]), [{"temperature": 0}], vocab_limit=3)
    args[1] = torch.tensor([[2.0, 1.0, 1.5, 9.0]])
    token, logprob, rank = SPEC.overload(*args)
    assert (int(token), int(rank)) == (1, 3)
    assert abs(float(logprob) - float(args[1].log_softmax(-1)[0, 1])) < 1e-6


# The kernels

FILTERS = [
    OFF | dict(zip(("temperature", "top_k", "top_p", "min_p"), values, strict=True))
    for values in itertools.product((0.05, 1.0), (0, 20), (0.9, 1.0), (0.0, 0.03))
]


def check_kernels(args: list[Any]) -> list[Tensor]:
    """The emulated kernels against the body; the threads' order changes nothing."""
    expected = SPEC.overload(*args)
    got = run_emulated(SPEC, args)
    assert torch.equal(got[0], expected[0]) and torch.equal(got[2], expected[2])
    torch.testing.assert_close(got[1], expected[1], rtol=2e-6, atol=2e-6)
    backward = run_emulated(SPEC, args, reverse=True)
    assert all(torch.equal(a, b) for a, b in zip(got, backward, strict=True))
    return list(got)


def test_rows_of_many_chunks_with_any_filters() -> None:
    check_kernels(operands(5 * normal(len(FILTERS), 2500), FILTERS, vocab_limit=2400))


def test_a_row_does_not_depend_on_those_beside_it() -> None:
    args = operands(3 * normal(4, 2100), [{"top_k": 30}, {"temperature": 0}, {}, {"top_p": 0.8}])
    together = check_kernels(args)
    for row in range(4):
        alone = run_emulated(SPEC, [arg[row : row + 1].clone() for arg in args[:-1]] + [0])
        assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize(
    "params",
    [{"top_p": 0.9}, {"top_k": 2600}, {"top_k": 3000, "top_p": 0.7}, {"min_p": 0.01, "top_p": 0.8}, {"min_p": 0.02}],
)
def test_more_candidates_than_there_is_room_for(params: dict[str, Any]) -> None:
    logits = torch.cat([normal(1, 3500), (normal(1, 3500, 1) * 8).round() / 8])
    check_kernels(operands(logits, [params] * 2))


def test_equal_logits_are_all_kept() -> None:
    check_kernels(operands(torch.zeros(3, 2200), [{"top_k": 1}, {"top_p": 0.001}, {"temperature": 0}]))


def test_logits_far_apart() -> None:
    logits = normal(3, 2100) * 1e4
    logits[:, ::2] = -torch.inf
    rows = [{"top_k": 50, "top_p": 0.9}, {"top_p": 0.99, "temperature": 1e5}, {"min_p": 1e-30}]
    check_kernels(operands(logits, rows))


def test_penalties_with_filters() -> None:
    args = operands(3 * normal(4, 2500), [{"top_k": 20}, {"temperature": 0}, {}, {"top_p": 0.9}])
    args[1] = args[0] + normal(4, 2500, 1)
    check_kernels(args)


def test_too_many_rows_are_refused() -> None:
    with pytest.raises(PluginError, match="4097 rows of logits, expected at most 4096"):
        run_emulated(SPEC, operands(torch.zeros(4097, 2), [OFF] * 4097))
