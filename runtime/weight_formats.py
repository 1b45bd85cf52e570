"""The formats in which a program holds a weight, and the names of the tensors that a quantized weight consists of."""

from __future__ import annotations

from enum import StrEnum


class WeightFormat(StrEnum):
    """How the elements of a weight are stored; its value is its name in tables and manifests."""

    FLOAT = "float"
    """Elements of 16 or 32 bits: in a program, its activation dtype."""
    FP8 = "fp8"
    """E4M3 with one scale for a matrix."""
    FP8_BLOCKS = "fp8 blocks"
    """E4M3 with one scale for 128 x 128 elements."""
    NVFP4 = "nvfp4"
    """E2M1 with an E4M3 scale for 16 elements of a row, and one more scale for a matrix."""


class Part(StrEnum):
    """A tensor of a quantized weight."""

    CODES = "codes"
    """``float8_e4m3fn`` of the weight's shape, or for NVFP4 ``float4_e2m1fn_x2`` with half the last dim."""
    BLOCK_SCALES = "block_scales"
    """NVFP4 only: ``float8_e4m3fn``, a sixteenth of the last dim."""
    SCALES = "scales"
    """float32.

    One scale for each of G equal groups of rows: ``[1]`` for a matrix, ``[S]`` for an n-gram table in S shards,
    ``[E, G]`` for experts, where G is 2 for gate and up and 1 for down. FP8 in blocks: the grid
    ``[ceil(N/128), ceil(K/128)]`` of a matrix, ``[E, 2, ceil(I/128), ceil(H/128)]`` for gate and up,
    ``[E, ceil(H/128), ceil(I/128)]`` for down.
    """


DEQUANTIZE = {
    WeightFormat.FP8: "dequantize_fp8",
    WeightFormat.FP8_BLOCKS: "dequantize_fp8_blocks",
    WeightFormat.NVFP4: "dequantize_nvfp4",
}
"""Format -> the transform that makes a float32 weight of its parts, in the order of `Part`."""

PACKED_FP4 = "float4_e2m1fn_x2"
"""The dtype of NVFP4's codes."""


def part_name(weight: str, part: Part) -> str:
    """The name of a tensor of the quantized ``weight``: no checkpoint has a ``#`` in its names."""
    return f"{weight}#{part}"
