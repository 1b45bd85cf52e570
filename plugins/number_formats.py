"""Number formats of quantized weights: NVFP4 (E2M1 codes with E4M3 block scales) and FP8 with block scales.

E4M3 is torch's ``float8_e4m3fn``: 1.4.3 bits, bias 7, subnormals, no infinity, NaN at ``0x7f`` and ``0xff``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from qwen4exp_trt.errors import PluginError

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The value of each 4-bit code: a sign bit over seven magnitudes and zero."""

E2M1_MAX = 6.0
E4M3_MAX = 448.0
NVFP4_BLOCK = 16
"""Elements along K that share an E4M3 scale."""
FP8_BLOCK = 128
"""Rows and columns that share a scale in FP8 checkpoints."""

_CODE_OF_DOUBLED = (0, 1, 2, 3, 4, 4, 5, 5, 6, 6, 6, 6, 7)
"""Code of the magnitude m at index 2 * m; the indices between are magnitudes that E2M1 lacks."""
_LAST_E4M3_BYTE = 0x7E
_EXPONENT_BITS = 0x7F800000
_ROUND_TO_HALVES = 1.5 * 2.0**22
"""Adding this to a small float32 and taking it off again rounds to multiples of 1/2, ties to even."""
_SCALE_STEPS = (0, -1, 1, -2, 2, -3, 3, 4, 5, -4, 6)
"""Block scales to try, in E4M3 steps from amax / 6: down to where the largest value is clipped by about a third, up to
where it becomes 4 or less. Of equally good ones the first wins."""
_BLOCKS_AT_ONCE = {"cpu": 1 << 13, "cuda": 1 << 20}
"""Blocks that are quantized together: in float32 what fits a core's cache, or 64 MiB, which fill a GPU."""
_VALUES_OF_BYTE = torch.tensor(
    [(E2M1_VALUES[byte & 15], E2M1_VALUES[byte >> 4]) for byte in range(256)], dtype=torch.float32
)
_E4M3_VALUES = torch.arange(256, dtype=torch.int32).to(torch.uint8).view(torch.float8_e4m3fn).float()


def pack_e2m1(codes: Tensor) -> Tensor:
    """uint8 codes ``[..., K]`` (0..15, K even) -> bytes ``[..., K/2]``; the even element is the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """Bytes ``[..., K/2]`` (uint8 or ``float4_e2m1fn_x2``) -> uint8 codes ``[..., K]``."""
    packed = packed.view(torch.uint8)
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def e4m3_from_float(x: Tensor) -> Tensor:
    """Round to nearest even, and to the largest finite value beyond it. NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def float_from_e4m3(x: Tensor) -> Tensor:
    """``float8_e4m3fn`` -> float32, by a table: on a CPU, torch's own conversion takes five times as long."""
    return _E4M3_VALUES.to(x.device).index_select(0, x.view(torch.uint8).flatten().int()).view(x.shape)


def scales_of_rows(scales: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """The scale of each of ``rows`` (ids, any shape) of a table whose equal groups of rows have ``scales`` ``[S]``.

    Raises PluginError where the ``num_rows`` of the table are not a multiple of S.
    """
    if num_rows % len(scales):
        raise PluginError(f"a table of {num_rows} rows has {len(scales)} scales, which must divide its number of rows")
    return scales[rows // (num_rows // len(scales))]


# --- NVFP4 ----------------------------------------------------------------------------------------------------------


def dequantize_nvfp4(packed: Tensor, block_scales: Tensor, global_scale: Tensor) -> Tensor:
    """``e2m1 * e4m3(block) * global``, float32 ``[..., K]``.

    ``packed`` ``[..., K/2]`` holds two codes a byte (uint8 or ``float4_e2m1fn_x2``), ``block_scales``
    ``[..., K/16]`` is ``float8_e4m3fn``, and ``global_scale`` float32 broadcasts against the dims before K. The product
    of code and block scale is exact, so that there is one rounding. Raises PluginError for shapes that do not fit.
    """
    check_nvfp4_shapes(packed.shape[-1] * 2, packed.shape[:-1], block_scales)
    pairs = _VALUES_OF_BYTE.to(packed.device).view(torch.float64).flatten()  # a byte's two values are one element
    codes = packed.view(torch.uint8).flatten().int()
    weight = pairs.index_select(0, codes).view(torch.float32).view(*packed.shape[:-1], -1)
    weight.unflatten(-1, (-1, NVFP4_BLOCK)).mul_(float_from_e4m3(block_scales).unsqueeze(-1))
    return weight.mul_(global_scale.float().unsqueeze(-1))


def encode_nvfp4(weight: Tensor, block_scales: Tensor, global_scale: Tensor) -> Tensor:
    """The packed codes, uint8 ``[..., K/2]``, of a float weight ``[..., K]`` under given scales.

    The definition of the format, operation by operation in float32, as modelopt has it: divide the weight by
    (block scale * global scale), round the quotient to the nearest E2M1 magnitude, a tie to the even code, anything
    above 5 to 6; the sign bit is set where the quotient is below zero, so that a negative value that rounds to zero
    keeps its sign and -0 loses it. Raises PluginError for scales that are not positive and finite, for a weight with
    NaN or infinity, and for shapes that do not fit.
    """
    check_nvfp4_shapes(weight.shape[-1], weight.shape[:-1], block_scales)
    scale = block_scales.float() * global_scale.float().unsqueeze(-1)
    if not (torch.isfinite(scale) & (scale > 0)).all():
        raise PluginError("NVFP4 scales must be positive and finite, and so must block scale * global scale")
    finite_amax(weight)
    codes = _codes(weight.float().unflatten(-1, (-1, NVFP4_BLOCK)) / scale.unsqueeze(-1))
    return pack_e2m1(codes.flatten(-2))


def finite_amax(weight: Tensor) -> float:
    """The largest magnitude; PluginError for NaN or infinity."""
    amax = max(abs(bound.item()) for bound in torch.aminmax(weight)) if weight.numel() else 0.0
    if not math.isfinite(amax):
        raise PluginError("the weight holds NaN or infinity, which NVFP4 cannot; the checkpoint is damaged")
    return amax


def nvfp4_scale(amax: float) -> Tensor:
    """The global scale, a float32 scalar, of a matrix whose largest magnitude is ``amax``: amax / (6 * 448)."""
    smallest = torch.finfo(torch.float32).tiny
    return torch.tensor(max(amax / (E2M1_MAX * E4M3_MAX), smallest) if amax else 1.0)


def quantize_nvfp4(weight: Tensor, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """A float weight ``[..., K]`` -> (packed uint8 ``[..., K/2]``, block scales ``[..., K/16]``, global scale).

    Block scales are ``float8_e4m3fn``; the global scale is a float32 scalar, amax / (6 * 448) unless given. Each block
    takes the scale of least squared error among E4M3 steps around amax / 6, which may clip its largest values; a block
    of zeros takes 1. CPU and GPU give the same bits. Raises PluginError for NaN or infinity and for a K that is not a
    multiple of 16.
    """
    if weight.shape[-1] % NVFP4_BLOCK:
        raise PluginError(f"NVFP4 needs a multiple of {NVFP4_BLOCK} elements a row, got shape {list(weight.shape)}")
    amax = finite_amax(weight)
    if global_scale is None:
        global_scale = nvfp4_scale(amax).to(weight.device)
    blocks = weight.reshape(-1, NVFP4_BLOCK)
    scales = torch.empty(len(blocks), dtype=torch.float8_e4m3fn, device=weight.device)
    packed = torch.empty(len(blocks), NVFP4_BLOCK // 2, dtype=torch.uint8, device=weight.device)
    step = _BLOCKS_AT_ONCE[weight.device.type]
    for start in range(0, len(blocks), step):
        part = slice(start, start + step)
        scales[part] = _best_block_scales(blocks[part].float(), global_scale)
        packed[part] = encode_nvfp4(blocks[part], scales[part, None], global_scale)
    rows = weight.shape[:-1]
    return packed.reshape(*rows, -1), scales.reshape(*rows, -1), global_scale


def quantize_nvfp4_activations(x: Tensor, input_scale: float) -> tuple[Tensor, Tensor]:
    """Activations ``[..., K]`` -> (packed uint8 ``[..., K/2]``, ``float8_e4m3fn`` block scales ``[..., K/16]``).

    What TensorRT's dynamic quantization computes, in float32: the block scale is e4m3(amax / (6 * input_scale)), the
    code is the E2M1 number nearest to x / (block scale * input_scale), ties to even. A value beyond the range of
    ``input_scale``, 6 * 448 times it, saturates. A block whose scale rounds to zero becomes zeros, and one with a NaN
    gets a NaN for its scale. Raises PluginError for a scale that is not positive and finite in float32, and for a K
    that is not a multiple of 16.
    """
    scale = torch.tensor(input_scale, dtype=torch.float32, device=x.device)
    if not (torch.isfinite(scale) and scale > 0):
        raise PluginError(f"the input scale is {input_scale!r}; it must be positive and finite")
    if x.shape[-1] % NVFP4_BLOCK:
        raise PluginError(f"NVFP4 needs a multiple of {NVFP4_BLOCK} elements a row, got shape {list(x.shape)}")
    blocks = x.float().unflatten(-1, (-1, NVFP4_BLOCK))
    block_scales = e4m3_from_float(blocks.abs().amax(-1) / (E2M1_MAX * scale))
    divisor = (block_scales.float() * scale).unsqueeze(-1)
    quotient = torch.where(divisor > 0, blocks / divisor, torch.zeros_like(blocks))
    return pack_e2m1(_codes(quotient).flatten(-2)), block_scales


def _best_block_scales(blocks: Tensor, global_scale: Tensor) -> Tensor:
    """The E4M3 scale of least squared error of each row of float32 ``[B, 16]``."""
    magnitudes = blocks.T.abs().contiguous()  # a block is a column, so that sums over blocks add whole rows
    amax = magnitudes.amax(0)
    first = e4m3_from_float(amax / (E2M1_MAX * global_scale)).view(torch.uint8).int()
    best_error, best = torch.full_like(amax, math.inf), first
    values = _E4M3_VALUES.to(amax.device)
    for step in _SCALE_STEPS:
        byte = (first + step).clamp(1, _LAST_E4M3_BYTE)
        scale = values.index_select(0, byte) * global_scale
        quotient = magnitudes / scale
        error = _sum_rows(_round_magnitudes(quotient).sub_(quotient).square_()) * scale.square()
        better = error < best_error
        best_error, best = torch.where(better, error, best_error), torch.where(better, byte, best)
    scales = best.to(torch.uint8).view(torch.float8_e4m3fn)
    return torch.where(amax == 0, torch.ones_like(amax), scales.float()).to(torch.float8_e4m3fn)


def _sum_rows(x: Tensor) -> Tensor:
    """The sum of the 16 rows of ``x``, which it overwrites, in an order that is the same on every device."""
    for half in (8, 4, 2, 1):
        x = x[:half].add_(x[half:])
    return x[0]


def _round_magnitudes(x: Tensor) -> Tensor:
    """Nonnegative float32 rounded to E2M1 magnitudes: steps of 1/2 below 2, of 1 below 4, of 2 up to 6."""
    power_of_two = x.clamp(1, 4).view(torch.int32).bitwise_and_(_EXPONENT_BITS).view(torch.float32)
    shift = power_of_two.mul_(_ROUND_TO_HALVES)
    return (x + shift).sub_(shift).clamp_max_(E2M1_MAX)


def _codes(quotient: Tensor) -> Tensor:
    doubled = (_round_magnitudes(quotient.abs()) * 2).int()
    table = torch.tensor(_CODE_OF_DOUBLED, dtype=torch.uint8, device=quotient.device)
    return table.index_select(0, doubled.flatten()).view(doubled.shape) | ((quotient < 0).to(torch.uint8) << 3)


def check_nvfp4_shapes(size: int, rows: Sequence[int], block_scales: Tensor) -> None:
    """`PluginError` unless these are the block scales of a weight ``[*rows, size]``."""
    expected = [*rows, size // NVFP4_BLOCK]
    if size % NVFP4_BLOCK or list(block_scales.shape) != expected or block_scales.dtype != torch.float8_e4m3fn:
        raise PluginError(
            f"NVFP4 block scales of a weight [{', '.join(map(str, (*rows, size)))}] must be float8_e4m3fn {expected}, "
            f"one for {NVFP4_BLOCK} elements; got {block_scales.dtype} {list(block_scales.shape)}"
        )


# --- FP8 ------------------------------------------------------------------------------------------------------------


def dequantize_fp8_blocks(weight: Tensor, scale_inv: Tensor) -> Tensor:
    """``e4m3 * scale`` of ``float8_e4m3fn`` ``[..., N, K]`` -> float32; one scale for each 128 x 128 block.

    ``scale_inv`` ``[..., ceil(N/128), ceil(K/128)]`` is what checkpoints call ``weight_scale_inv``: a multiplier.
    Raises PluginError for scales of another shape.
    """
    check_fp8_block_shapes(weight, scale_inv)
    by_column = scale_inv.float().repeat_interleave(FP8_BLOCK, -1)[..., : weight.shape[-1]]
    result = float_from_e4m3(weight)
    for block, scales in enumerate(by_column.unbind(-2)):
        result[..., block * FP8_BLOCK : (block + 1) * FP8_BLOCK, :].mul_(scales.unsqueeze(-2))
    return result


def check_fp8_block_shapes(weight: Tensor, scale_inv: Tensor) -> None:
    """`PluginError` unless ``scale_inv`` has the shape of ``weight``'s blocks."""
    *rest, rows, columns = weight.shape
    expected = [*rest, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)]
    if weight.dtype != torch.float8_e4m3fn or list(scale_inv.shape) != expected:
        raise PluginError(
            f"an FP8 weight must be float8_e4m3fn with scales {expected}, one for {FP8_BLOCK} x {FP8_BLOCK} elements; "
            f"got {weight.dtype} {list(weight.shape)} with scales {list(scale_inv.shape)}"
        )
