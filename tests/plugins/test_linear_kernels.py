"""Products with quantized weights in the emulator: parts of K, tiles of tokens, odd edges; and what GPUs get."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_emulator import run_emulated
from op_checks import equal_bits, rms_error

from qwen4exp_trt.plugins.compile import compile_kernel
from qwen4exp_trt.plugins.kernels import MAX_SHARED_BYTES, Plan
from qwen4exp_trt.plugins.linear_launch import NVFP4, Split, split_product
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.sample_batches import normal, sample_fp8, sample_nvfp4

OPS = ("nvfp4_linear", "fp8_linear")
RELEASED = ((16384, 2560), (13312, 2560), (2560, 6144), (248320, 2560), (2560, 10240))
"""Rows and columns of the projections of the released model, and of the issue's bar."""


def operands(op: str, tokens: int, rows: int, columns: int, seed: int = 0) -> list[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = normal(generator, tokens, columns, dtype=torch.bfloat16)
    if op == "fp8_linear":
        return [x, *sample_fp8(generator, rows, columns)]
    weight, block_scales, scales = sample_nvfp4(generator, rows, columns)
    return [x, weight, block_scales, scales.repeat(rows) * (1 + torch.arange(rows) % 3)]


def plan(op: str, tokens: int, rows: int, columns: int, num_sms: int) -> Plan:
    shapes: dict[str, list[int]] = {"x": [tokens, columns], "weight": [rows, columns]}
    if op == "fp8_linear":
        shapes |= {"scales": [-(-rows // 128), -(-columns // 128)]}
    else:
        shapes |= {"block_scales": [rows, columns // 16], "row_scales": [rows]}
    spec = all_specs()[op]
    names = {"activation": "bfloat16"}
    dtypes = {arg.name: getattr(torch, names.get(arg.dtype, arg.dtype)) for arg in spec.inputs}
    return spec.plan(shapes, dtypes, {}, num_sms)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "tokens,rows,columns,num_sms",
    [
        (1, 50, 1152, 4),  # warps with fewer steps than others
        (1, 37, 1152, 24),
        (3, 33, 1024, 24),  # K in parts, a tile of one row
        (8, 24, 3712, 4),  # K in parts
        (8, 100, 640, 1),  # several tiles for a block
        (9, 37, 640, 4),
        (17, 130, 256, 2),  # two blocks of rows, an odd number of tokens
        (70, 40, 192, 4),  # a tile, of which most rows do not exist
        pytest.param(130, 300, 512, 7, marks=pytest.mark.slow),  # a tile whole, others in parts of K
    ],
)
def test_products_equal_float32(op: str, tokens: int, rows: int, columns: int, num_sms: int) -> None:
    spec = all_specs()[op]
    args = operands(op, tokens, rows, columns)
    expected = spec.body(args[0].float(), *args[1:])
    (got,) = run_emulated(spec, args, num_sms=num_sms)
    assert rms_error(expected, got) <= spec.tolerance[torch.bfloat16]
    (again,) = run_emulated(spec, args, num_sms=num_sms, reverse=True)
    assert equal_bits(got, again)


@pytest.mark.parametrize("tokens,rows,columns", [(70, 40, 104), (65, 133, 640)])
def test_products_of_many_tokens_in_bf16(tokens: int, rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (normal(generator, size, columns, dtype=torch.bfloat16) for size in (tokens, rows))
    (got,) = run_emulated(all_specs()["linear"], [x, weight])
    assert rms_error(x.float() @ weight.float().T, got) <= 3e-3
    assert equal_bits(got, run_emulated(all_specs()["linear"], [x, weight], reverse=True)[0])


def test_block_scaled_products() -> None:
    """What tensor cores do from SM120 on, by the layout that the PTX ISA gives."""
    spec = all_specs()["nvfp4_w4a4_linear"]
    args = [*operands("nvfp4_linear", 70, 132, 256), 4 / (6 * 448)]
    args[0][1, 3], args[0][2, :32] = torch.nan, 0
    expected = spec.body(args[0].float(), *args[1:])
    (got,) = run_emulated(spec, args, capability=(12, 1))
    assert got[1].isnan().all()
    keep = [token for token in range(len(got)) if token != 1]
    assert rms_error(expected[keep], got[keep]) <= spec.tolerance[torch.bfloat16]
    (again,) = run_emulated(spec, args, capability=(12, 1), reverse=True)
    assert equal_bits(got, again)


def test_a_token_that_is_not_finite_stays_alone() -> None:
    spec = all_specs()["nvfp4_linear"]
    for tokens in (3, 12):
        args = operands("nvfp4_linear", tokens, 40, 128)
        (clean,) = run_emulated(spec, args)
        args[0][1, 5] = torch.nan
        (got,) = run_emulated(spec, args)
        assert got[1].isnan().all()
        keep = [token for token in range(tokens) if token != 1]
        assert equal_bits(clean[keep], got[keep])


def test_products_are_split_so_that_all_multiprocessors_work() -> None:
    assert split_product(1, 16384, 2560, NVFP4, 132) == Split(1, 1, 5)
    assert split_product(1, 248320, 2560, NVFP4, 48) == Split(1, 1, 5)
    assert split_product(1, 2560, 6144, NVFP4, 132) == Split(1, 1, 6, k_warps=8, halves=1)
    assert split_product(8, 2560, 10240, NVFP4, 132) is not None
    assert split_product(8, 9000, 10240, NVFP4, 132) is None  # too many columns for one part, too many rows for several


@pytest.mark.parametrize("op", OPS)
def test_scratch_does_not_shrink(op: str) -> None:
    """A workspace is asked for once, for the largest shapes on the largest GPU."""
    for rows, columns in RELEASED:
        for num_sms in (20, 48, 132, 192):
            sizes = [plan(op, tokens, rows, columns, num_sms).scratch_bytes for tokens in (*range(1, 70), 129, 512)]
            assert sizes == sorted(sizes)
        for tokens in (1, 8, 9, 64, 512):
            sizes = [plan(op, tokens, rows, columns, num_sms).scratch_bytes for num_sms in range(1, 193, 5)]
            assert sizes == sorted(sizes)


@pytest.mark.slow
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("arch", ["sm_121a", "sm_90", "sm_80"])
def test_kernels_fit(op: str, arch: str) -> None:
    num_sms = {"sm_121a": 48, "sm_90": 132, "sm_80": 108}[arch]
    launches = {
        launch.kernel: launch
        for rows, columns in (*RELEASED[:1], RELEASED[2], RELEASED[4])
        for tokens in (1, 2, 4, 8, 16, 32, 64, 2048)
        for launch in plan(op, tokens, rows, columns, num_sms).launches
    }
    for launch in launches.values():
        cubin = compile_kernel(launch.kernel, arch)
        assert cubin.spill_bytes == 0, launch.kernel
        assert cubin.shared_bytes + launch.shared_bytes <= MAX_SHARED_BYTES, launch.kernel


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quantize_activations", "block_scaled"])
def test_block_scaled_kernels_fit(name: str) -> None:
    spec = all_specs()["nvfp4_w4a4_linear"]
    rows, columns = RELEASED[0]
    shapes = {"x": [2048, columns], "weight": [rows, columns], "block_scales": [rows, columns // 16], "alpha": [rows]}
    dtypes = dict(
        zip(shapes, (torch.bfloat16, torch.float4_e2m1fn_x2, torch.float8_e4m3fn, torch.float32), strict=True)
    )
    found = spec.plan(shapes, dtypes, {"input_scale": 1e-3}, 48, capability=(12, 1)).launches
    launch = next(launch for launch in found if launch.kernel.entry == name)
    cubin = compile_kernel(launch.kernel, "sm_121a")
    assert cubin.spill_bytes == 0
    assert cubin.shared_bytes + launch.shared_bytes <= MAX_SHARED_BYTES
