"""Products with quantized weights on a GPU at released and odd sizes, against their bodies in float32."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from op_checks import equal_bits, rms_error
from torch import Tensor

from qwen4exp_trt.plugins.cuda_body import semaphores
from qwen4exp_trt.plugins.registry import all_specs

pytestmark = pytest.mark.gpu

TOKENS = (*range(1, 10), 17, 64, 100, 512)
SIZES = {
    "qkvz": (16384, 2560),
    "out": (2560, 6144),
    "bar": (2560, 10240),
    "odd": (1007, 2688),  # rows of no whole tile, warps with fewer steps of K than others
    "one-row": (1, 320),
    "small": (45, 2576),  # columns that the tensor cores cannot take
}


@cache
def weight(op: str, rows: int, columns: int) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(rows + columns)

    def random_bytes(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda", generator=generator)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, device="cuda", generator=generator) * columns**-0.5

    if op == "fp8_linear":
        codes = torch.cat([random_bytes(0, 0x7F, rows, columns // 2), random_bytes(0x80, 0xFF, rows, columns // 2)], 1)
        return codes.view(torch.float8_e4m3fn), 1e-2 * uniform(-(-rows // 128), -(-columns // 128))
    codes = random_bytes(0, 256, rows, columns // 2).view(torch.float4_e2m1fn_x2)
    scales = random_bytes(0, 0x7F, rows, columns // 16).view(torch.float8_e4m3fn)  # zero and subnormal ones too
    return codes, scales, 1e-2 * uniform(rows)


def operands(op: str, tokens: int, rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, columns, device="cuda", generator=generator).to(dtype)
    args = [x, *weight(op, rows, columns)]
    return [*args, 4 / (6 * 448)] if op == "nvfp4_w4a4_linear" else args


def run(op: str, args: list[Any]) -> Tensor:
    """On memory that is full of NaN."""
    poison = [torch.full((1 << 22,), torch.nan, device="cuda") for _ in range(4)]
    del poison
    out = all_specs()[op].overload(*args)
    assert not semaphores(0).any()
    return out


def check(op: str, args: list[Any]) -> None:
    spec, dtype = all_specs()[op], args[0].dtype
    expected = spec.body(args[0].float(), *args[1:])
    got = run(op, args)
    assert got.dtype == dtype
    assert rms_error(expected, got) <= spec.tolerance[dtype]
    assert equal_bits(got, run(op, args))


@pytest.mark.parametrize("op", ["nvfp4_linear", "fp8_linear"])
@pytest.mark.parametrize("size", SIZES)
def test_products(op: str, size: str) -> None:
    for tokens in TOKENS:
        check(op, operands(op, tokens, *SIZES[size], torch.bfloat16, seed=tokens))


@pytest.mark.parametrize("op", ["nvfp4_linear", "fp8_linear", "nvfp4_w4a4_linear"])
def test_products_of_float32(op: str) -> None:
    for tokens in (1, 9, 70):
        check(op, operands(op, tokens, *SIZES["odd"], torch.float32))


def test_logits() -> None:
    for tokens in (1, 8, 64):
        check("nvfp4_linear", operands("nvfp4_linear", tokens, 248320, 2560, torch.bfloat16))


@pytest.mark.parametrize("size", ["qkvz", "out", "odd", "small"])
def test_products_of_rounded_activations(size: str) -> None:
    for tokens in (1, 5, 8, 64, 100):
        check("nvfp4_w4a4_linear", operands("nvfp4_w4a4_linear", tokens, *SIZES[size], torch.bfloat16))


def test_rounded_activations_that_are_not_finite() -> None:
    for tokens in (4, 20):
        args = operands("nvfp4_w4a4_linear", tokens, *SIZES["odd"], torch.bfloat16)
        args[0][1, 7], args[0][2, 9] = torch.nan, torch.inf
        got, expected = run("nvfp4_w4a4_linear", args), all_specs()["nvfp4_w4a4_linear"].body(*args)
        assert got[1].isnan().all()
        keep = [token for token in range(tokens) if token != 1]
        assert rms_error(expected[keep], got[keep]) <= 3e-3


def test_a_captured_product_replays() -> None:
    """In a graph behind the kernel that writes its activations, with which it overlaps."""
    spec = all_specs()["nvfp4_linear"]
    for size in ("out", "qkvz"):
        args = operands("nvfp4_linear", 2, *SIZES[size], torch.bfloat16)
        first = [operands("nvfp4_linear", 2, SIZES[size][1], 2560, torch.bfloat16, seed)[0] for seed in (1, 2)]
        before = weight("nvfp4_linear", SIZES[size][1], 2560)
        source = first[0].clone()

        def step(source: Tensor = source, before: Any = before, args: list[Any] = args) -> Tensor:
            return spec.overload(spec.overload(source, *before), *args[1:])

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step()
        for values in (*first, *first):
            source.copy_(values)
            graph.replay()
            assert equal_bits(out, step(values))
