"""NVFP4 and FP8 formats against definitions written bit by bit in plain Python."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.number_formats import (
    E2M1_VALUES,
    dequantize_fp8_blocks,
    dequantize_nvfp4,
    e4m3_from_float,
    encode_nvfp4,
    float_from_e4m3,
    pack_e2m1,
    quantize_nvfp4,
    quantize_nvfp4_activations,
    unpack_e2m1,
)

FP8 = torch.float8_e4m3fn


def e4m3_of_byte(byte: int) -> float:
    """1 sign, 4 exponent bits with bias 7, 3 mantissa bits; exponent 0 is subnormal, all ones but the sign NaN."""
    sign, exponent, mantissa = -1.0 if byte & 0x80 else 1.0, (byte >> 3) & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


def e2m1_of_code(code: int) -> float:
    """1 sign, 2 exponent bits with bias 1, 1 mantissa bit; exponent 0 is subnormal."""
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, (code >> 1) & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (2 + mantissa) * 2.0 ** (exponent - 2))


def code_of_quotient(quotient: float) -> int:
    """The nearest magnitude, of two equally near ones the one of even code."""
    code = min(range(8), key=lambda c: (abs(e2m1_of_code(c) - abs(quotient)), c & 1))
    return code | (8 if quotient < 0 else 0)


def all_bytes() -> Tensor:
    return torch.arange(256).to(torch.uint8)


def random_scales(*shape: int, seed: int = 0) -> Tensor:
    """Every positive E4M3 byte, subnormals too."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 0x7F, shape, generator=generator).to(torch.uint8).view(FP8)


def test_every_e4m3_byte_decodes() -> None:
    expected = torch.tensor([e4m3_of_byte(byte) for byte in range(256)])
    found = float_from_e4m3(all_bytes().view(FP8))
    assert torch.equal(found.isnan(), expected.isnan()) and int(found.isnan().sum()) == 2
    assert torch.equal(found.nan_to_num(7e7), expected.nan_to_num(7e7))
    assert torch.equal(found.signbit(), expected.signbit() | (all_bytes() == 0xFF))


def test_every_e4m3_byte_is_encoded_from_its_value_and_its_ties() -> None:
    finite = list(range(0x7F))
    values = torch.tensor([e4m3_of_byte(byte) for byte in finite])
    assert e4m3_from_float(values).view(torch.uint8).tolist() == finite
    assert e4m3_from_float(-values).view(torch.uint8).tolist() == [byte | 0x80 for byte in finite]
    ties = (values[:-1] + values[1:]) / 2
    assert e4m3_from_float(ties).view(torch.uint8).tolist() == [byte + (byte & 1) for byte in finite[:-1]]
    above, below = torch.nextafter(ties, torch.tensor(1e9)), torch.nextafter(ties, torch.tensor(0.0))
    assert e4m3_from_float(above).view(torch.uint8).tolist() == finite[1:]
    assert e4m3_from_float(below).view(torch.uint8).tolist() == finite[:-1]


def test_e4m3_saturates_and_keeps_nan() -> None:
    found = e4m3_from_float(torch.tensor([449.0, 1e9, math.inf, -math.inf, math.nan])).float()
    assert found[:4].tolist() == [448.0, 448.0, 448.0, -448.0] and found[4].isnan()


def test_every_e2m1_code() -> None:
    expected = [e2m1_of_code(code) for code in range(16)]
    assert list(E2M1_VALUES) == expected
    assert [math.copysign(1, v) for v in E2M1_VALUES] == [math.copysign(1, v) for v in expected]


def test_the_even_element_is_the_low_nibble() -> None:
    assert pack_e2m1(torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)).tolist() == [[0x21, 0x0F]]
    assert unpack_e2m1(torch.tensor([[0x21, 0x0F]], dtype=torch.uint8)).tolist() == [[1, 2, 15, 0]]
    assert torch.equal(pack_e2m1(unpack_e2m1(all_bytes())), all_bytes())
    assert torch.equal(unpack_e2m1(all_bytes().view(torch.float4_e2m1fn_x2)), unpack_e2m1(all_bytes()))


def test_dequantize_every_code_under_every_scale() -> None:
    """``[254, 16]``: each finite byte as the block scale of all 16 codes; one rounding of the exact product."""
    codes = torch.arange(16).to(torch.uint8).expand(254, 16)
    finite = [byte for byte in range(256) if byte & 0x7F != 0x7F]
    scales = torch.tensor(finite, dtype=torch.uint8)[:, None].view(FP8)
    global_scale = torch.tensor(0.0123)
    found = dequantize_nvfp4(pack_e2m1(codes), scales, global_scale)
    for row, byte in enumerate(finite):
        exact = [e2m1_of_code(code) * e4m3_of_byte(byte) * float(global_scale) for code in range(16)]
        assert found[row].tolist() == [float(np.float32(value)) for value in exact]


def test_dequantize_takes_a_scale_for_each_row_and_expert() -> None:
    packed = torch.randint(0, 256, (3, 4, 16), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    scales, per_row = random_scales(3, 4, 2), torch.rand(3, 4) + 0.5
    found = dequantize_nvfp4(packed, scales, per_row)
    for e in range(3):
        for n in range(4):
            assert torch.equal(found[e, n], dequantize_nvfp4(packed[e, n], scales[e, n], per_row[e, n]))
    assert torch.equal(
        dequantize_nvfp4(packed, scales, per_row[:, :1]),
        dequantize_nvfp4(packed, scales, per_row[:, :1].expand(3, 4)),
    )


def test_encode_with_given_scales_is_the_format_bit_by_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    scales, global_scale = random_scales(8, 4), torch.tensor(3e-4)
    scale = (scales.float() * global_scale).repeat_interleave(16, -1)
    weight = torch.randn(8, 64, generator=generator) * 3 * scale
    found = unpack_e2m1(encode_nvfp4(weight, scales, global_scale))
    assert found.tolist() == [[code_of_quotient(q) for q in row] for row in (weight / scale).tolist()]
    assert len(set(found.flatten().tolist())) == 16


def test_encode_rounds_ties_to_even_and_clips() -> None:
    quotients = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.0001, 7.0, 1e30, 0.2501, 0.7499, 1.2501, 2.4999, 3.5001, -0.1]
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0, 6.0, 0.5, 0.5, 1.5, 2.0, 4.0, -0.0]
    weight, one = torch.tensor(quotients), torch.ones(1).to(FP8)
    codes = unpack_e2m1(encode_nvfp4(weight, one, torch.tensor(1.0))).tolist()
    assert [E2M1_VALUES[code] for code in codes] == expected
    assert codes[-1] == 8, "a negative value that rounds to zero keeps its sign"
    mirrored = unpack_e2m1(encode_nvfp4(-weight, one, torch.tensor(1.0))).tolist()
    assert mirrored == [code ^ 8 for code in codes]
    assert encode_nvfp4(torch.full((16,), -0.0), one, torch.tensor(1.0)).tolist() == [0] * 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantize_finds_the_least_squared_error_of_each_block(dtype: torch.dtype) -> None:
    """Against all 126 positive scales: the chosen one is at most 1 % worse, and far better than amax / 6 alone."""
    weight = (torch.randn(16, 64, generator=torch.Generator().manual_seed(1)) * 0.02).to(dtype)
    packed, scales, global_scale = quantize_nvfp4(weight)
    assert (packed.shape, scales.shape, global_scale.shape) == ((16, 32), (16, 4), ())
    assert global_scale.item() == pytest.approx(weight.abs().max().item() / (6 * 448), rel=1e-6)

    def error(candidate: Tensor) -> Tensor:
        decoded = dequantize_nvfp4(encode_nvfp4(weight, candidate, global_scale), candidate, global_scale)
        return (decoded - weight.float()).square().unflatten(-1, (-1, 16)).sum(-1)

    every = torch.arange(1, 0x7F).to(torch.uint8).view(FP8)
    least = torch.stack([error(scale.expand(16, 4)) for scale in every]).amin(0)
    amax = e4m3_from_float(weight.float().unflatten(-1, (-1, 16)).abs().amax(-1) / (6 * global_scale))
    found = error(scales)
    assert torch.equal(packed, encode_nvfp4(weight, scales, global_scale))
    assert (found <= least * 1.05).all() and found.sum() <= least.sum() * 1.01
    assert found.sum() < error(amax).sum() * 0.8


def test_the_search_has_the_bits_of_ieee_arithmetic() -> None:
    """numpy finds the same scales, operation by operation in float32, and so will a GPU: the order of sums is fixed."""
    f32 = np.float32
    weight = torch.randn(3000, 16, generator=torch.Generator().manual_seed(6))
    _, scales, global_scale = quantize_nvfp4(weight)
    magnitudes, g = np.abs(weight.numpy()), f32(global_scale.item())
    first = e4m3_from_float(torch.from_numpy(magnitudes.max(1) / (f32(6) * g))).view(torch.uint8).numpy().astype(int)
    grid = np.array([e2m1_of_code(code) for code in range(8)], f32)
    even_first = [0, 2, 4, 6, 1, 3, 5, 7]
    errors, candidates = [], []
    for step in (0, -1, 1, -2, 2, -3, 3, 4, 5, -4, 6):
        byte = np.clip(first + step, 1, 0x7E)
        scale = np.array([e4m3_of_byte(b) for b in byte], f32) * g
        quotient = magnitudes / scale[:, None]
        distance = np.abs(grid[even_first] - quotient.astype(np.float64)[..., None])
        squares = (grid[even_first][distance.argmin(-1)] - quotient) ** f32(2)
        for half in (8, 4, 2, 1):
            squares = squares[:, :half] + squares[:, half:]
        errors.append(squares[:, 0] * (scale * scale))
        candidates.append(byte)
    best = np.argmin(errors, 0)
    assert len(set(best.tolist())) > 5
    assert scales.flatten().view(torch.uint8).tolist() == np.choose(best, candidates).tolist()


@pytest.mark.gpu
def test_quantize_gives_the_same_on_a_gpu() -> None:
    weight = torch.randn(300_000, 16, generator=torch.Generator().manual_seed(7))
    for on_cpu, on_gpu in zip(quantize_nvfp4(weight), quantize_nvfp4(weight.cuda()), strict=True):
        assert torch.equal(on_cpu.reshape(-1).view(torch.uint8), on_gpu.cpu().reshape(-1).view(torch.uint8))


def test_quantize_undoes_dequantize() -> None:
    """What NVFP4 can represent comes back exactly under the same global scale."""
    packed = torch.randint(0, 256, (32, 64), generator=torch.Generator().manual_seed(2)).to(torch.uint8)
    scales, global_scale = random_scales(32, 8), torch.tensor(0.25)
    weight = dequantize_nvfp4(packed, scales, global_scale)
    assert torch.equal(dequantize_nvfp4(*quantize_nvfp4(weight, global_scale)), weight)


def test_quantize_gives_the_same_in_parts() -> None:
    weight = torch.randn(9000, 16, generator=torch.Generator().manual_seed(3))
    whole = quantize_nvfp4(weight)
    parts = [quantize_nvfp4(part, whole[2]) for part in weight.split(4000)]
    assert torch.equal(whole[0], torch.cat([packed for packed, _, _ in parts]))
    assert torch.equal(whole[1].view(torch.uint8), torch.cat([s.view(torch.uint8) for _, s, _ in parts]))


def test_zero_blocks_and_zero_weights() -> None:
    weight = torch.zeros(2, 32)
    packed, scales, global_scale = quantize_nvfp4(weight)
    assert (global_scale.item(), scales.float().unique().tolist(), packed.unique().tolist()) == (1.0, [1.0], [0])
    weight[0, 0] = 3.0
    packed, scales, global_scale = quantize_nvfp4(weight)
    assert scales.float()[0, 1] == scales.float()[1, 0] == 1.0
    assert dequantize_nvfp4(packed, scales, global_scale)[0, 0].item() == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize("size", [1e-20, 1e-38, 1e-44, 1e38])
def test_tiny_and_huge_weights_stay_finite(size: float) -> None:
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(4)).clamp(-3, 3) * size
    packed, scales, global_scale = quantize_nvfp4(weight)
    decoded = dequantize_nvfp4(packed, scales, global_scale)
    assert global_scale > 0 and (scales.float() > 0).all() and torch.isfinite(decoded).all()
    assert (decoded - weight).abs().max() <= max(0.3 * weight.abs().max().item(), 1e-38)


def test_a_block_far_below_the_others_takes_the_smallest_scale() -> None:
    weight = torch.ones(1, 32)
    weight[0, 16:] = 1e-9
    packed, scales, global_scale = quantize_nvfp4(weight)
    assert scales.view(torch.uint8).tolist()[0][1] >= 1
    assert dequantize_nvfp4(packed, scales, global_scale)[0, 16:].abs().max() <= 1e-9


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused(value: float) -> None:
    weight = torch.ones(2, 32)
    weight[1, 5] = value
    with pytest.raises(PluginError, match="holds NaN or infinity"):
        quantize_nvfp4(weight)
    with pytest.raises(PluginError, match="holds NaN or infinity"):
        encode_nvfp4(weight, torch.ones(2, 2).to(FP8), torch.tensor(1.0))


@pytest.mark.parametrize(("byte", "global_scale"), [(0, 1.0), (0x7F, 1.0), (0x81, 1.0), (1, 0.0), (1, math.inf)])
def test_scales_that_are_not_positive_are_refused(byte: int, global_scale: float) -> None:
    scales = torch.tensor([byte], dtype=torch.uint8).view(FP8)
    with pytest.raises(PluginError, match="must be positive and finite"):
        encode_nvfp4(torch.ones(16), scales, torch.tensor(global_scale))


def test_shapes_that_do_not_fit_are_refused() -> None:
    one = torch.tensor(1.0)
    with pytest.raises(PluginError, match=r"multiple of 16 elements a row, got shape \[2, 24\]"):
        quantize_nvfp4(torch.ones(2, 24))
    with pytest.raises(PluginError, match=r"of a weight \[2, 32\] must be float8_e4m3fn \[2, 2\].*got .* \[2, 1\]"):
        dequantize_nvfp4(torch.zeros(2, 16, dtype=torch.uint8), torch.ones(2, 1).to(FP8), one)
    with pytest.raises(PluginError, match=r"got torch\.float32"):
        dequantize_nvfp4(torch.zeros(2, 16, dtype=torch.uint8), torch.ones(2, 2), one)


def activations_of(x: Tensor, input_scale: float) -> tuple[list[float], Tensor]:
    """The block scales of a row, and code * block scale."""
    packed, block_scales = quantize_nvfp4_activations(x, input_scale)
    return block_scales.float().tolist(), dequantize_nvfp4(packed, block_scales, torch.tensor(1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_take_the_scale_of_their_largest_value(dtype: torch.dtype) -> None:
    x = torch.tensor([6.0, -5.0, 3.5, 2.5, 1.75, 1.25, 0.75, 0.25, *[-0.3] * 8, *[768.0] * 16], dtype=dtype)
    scales, values = activations_of(x, 0.5)
    assert scales == [2.0, 256.0]
    assert values[:9].tolist() == [12.0, -8.0, 8.0, 4.0, 4.0, 2.0, 2.0, 0.0, -1.0]
    assert values[16:].tolist() == [1536.0] * 16


def test_activations_beyond_the_calibrated_range_saturate() -> None:
    scales, values = activations_of(torch.tensor([1e4, -math.inf, 2688.0, *[1.0] * 13]), 1.0)
    assert scales == [448.0]
    assert values[:4].tolist() == [2688.0, -2688.0, 2688.0, 0.0]


def test_activations_too_small_for_a_scale_become_zero() -> None:
    """2**-10 is half of the smallest E4M3 number, a tie that goes to zero."""
    x = torch.cat([torch.zeros(16), torch.full((16,), 6 * 2.0**-10), torch.full((16,), 6.1 * 2.0**-10)])
    scales, values = activations_of(x, 1.0)
    assert scales == [0.0, 0.0, 2.0**-9]
    assert values.tolist() == [0.0] * 32 + [3 * 2.0**-9] * 16


def test_a_nan_among_activations_stays_in_its_block() -> None:
    x = torch.ones(2, 32)
    x[0, 3] = math.nan
    _, values = activations_of(x, 1.0)
    assert values[0, :16].isnan().all() and values[0, 16:].isfinite().all() and values[1].isfinite().all()


@pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan, 1e-50])
def test_an_input_scale_that_is_not_positive_is_refused(scale: float) -> None:
    with pytest.raises(PluginError, match=r"the input scale is .*; it must be positive and finite"):
        quantize_nvfp4_activations(torch.ones(1, 16), scale)


def test_activations_that_do_not_fill_blocks_are_refused() -> None:
    with pytest.raises(PluginError, match=r"multiple of 16 elements a row, got shape \[2, 24\]"):
        quantize_nvfp4_activations(torch.ones(2, 24), 1.0)


@pytest.mark.parametrize("shape", [(1, 1), (128, 256), (130, 257), (3, 200, 129)])
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
def test_fp8_blocks(shape: tuple[int, ...], scale_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(shape, generator=generator).to(FP8)
    grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
    scales = (torch.rand(grid, generator=generator) + 0.1).to(scale_dtype)
    found = dequantize_fp8_blocks(weight, scales)
    assert found.dtype == torch.float32 and found.shape == shape
    for _ in range(50):
        *rest, n, k = (int(torch.randint(0, extent, (), generator=generator)) for extent in shape)
        expected = weight[*rest, n, k].float() * scales[*rest, n // 128, k // 128].float()
        assert found[*rest, n, k] == expected


def test_fp8_scales_of_another_shape_are_refused() -> None:
    weight = torch.zeros(129, 128).to(FP8)
    with pytest.raises(PluginError, match=r"float8_e4m3fn with scales \[2, 1\].*got .* with scales \[1, 1\]"):
        dequantize_fp8_blocks(weight, torch.ones(1, 1))
    with pytest.raises(PluginError, match=r"got torch\.bfloat16"):
        dequantize_fp8_blocks(weight.bfloat16(), torch.ones(2, 1))
