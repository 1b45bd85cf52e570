"""Weights in their formats and activations, as the operands of the products in ``plugins/linear``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qwen4exp_trt.plugins.kernels import Arg, ScratchRef, TensorRef, c_type

WARP = 32


@dataclass(frozen=True)
class WeightFormat:
    """A struct of ``include/weight_formats.cuh``.

    A step of a warp is ``step`` elements of K, for which a slot in shared memory has ``slot_bytes``. Where K is a
    multiple of ``multiple``, it can be filled by 16 bytes at a time. ``most_tokens`` fit the registers at once.
    """

    name: str
    step: int
    slot_bytes: int
    multiple: int
    most_tokens: int

    @property
    def step_bytes(self) -> float:
        """Bytes of a row in a step."""
        return 64 + (8 if self.name == "Nvfp4" else 0)

    def tile_scale_bytes(self, rows: int, columns: int) -> int:
        """Shared memory for the block scales of a tile."""
        if self.name == "Nvfp4":
            return rows * 16 * (columns // 256 | 1)
        return 16 * ceil_div(columns, 512) if self.name == "Fp8Blocks" else 0


NVFP4 = WeightFormat("Nvfp4", 128, slot_bytes=1024 + 128, multiple=128, most_tokens=64)
FP8_BLOCKS = WeightFormat("Fp8Blocks", 64, slot_bytes=1024 + 16, multiple=16, most_tokens=32)
BF16 = WeightFormat("Bf16", 32, slot_bytes=1024, multiple=8, most_tokens=64)


@dataclass(frozen=True)
class Weight:
    """A weight ``[N, K]``: its values, scales of blocks, and float32 scales of rows ``[N]``."""

    format: WeightFormat
    values: TensorRef
    block_scales: TensorRef | None = None
    row_scales: TensorRef | None = None

    @property
    def rows(self) -> int:
        return self.values.shape[0]

    @property
    def columns(self) -> int:
        return self.values.shape[1]

    @property
    def args(self) -> tuple[Arg, ...]:
        """The kernels' three pointers; a format does not read those that it has not, which point at the values."""
        return self.values, self.block_scales or self.values, self.row_scales or self.values


@dataclass(frozen=True)
class Tokens:
    """Activations ``[T, K]``, an operand or scratch; T is ``count``."""

    values: TensorRef | ScratchRef
    dtype: torch.dtype
    count: int


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def product_defines(weight: Weight, out: TensorRef, **sizes: int) -> tuple[tuple[str, int | float | str], ...]:
    has_scales = int(weight.row_scales is not None)
    return (
        ("FORMAT", weight.format.name),
        ("OUTPUT", c_type(out.dtype)),
        ("SCALES_ROWS", has_scales),
        *sizes.items(),
    )
