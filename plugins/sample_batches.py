"""Packed batches and quantized weights for the ops' sample cases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from qwen4exp_trt.plugins.number_formats import FP8_BLOCK, e4m3_from_float, quantize_nvfp4


def sample_batch(
    query_lens: Sequence[int], context_lens: Sequence[int], padding_seqs: int = 0, padding_rows: int = 0
) -> dict[str, Any]:
    """Metadata of a packed batch whose slots are handed out in a scattered order.

    ``padding_seqs`` sequences and ``padding_rows`` rows follow the real ones, as in a batch padded to a fixed size.
    Returns ``query_start_loc``, ``seq_lens``, ``slot_ids``, ``num_seqs``, and the sizes ``T`` and ``num_slots``.
    """
    count = len(query_lens)
    starts = torch.tensor([0, *query_lens, *[0] * padding_seqs]).cumsum(0)
    lens = torch.tensor([q + c for q, c in zip(query_lens, context_lens, strict=True)] + [0] * padding_seqs)
    num_slots = count + 3
    slots = [(3 + 5 * b) % num_slots for b in range(count)]
    slots = slots if len(set(slots)) == count else list(range(count, 0, -1))
    return {
        "query_start_loc": starts.int(),
        "seq_lens": lens.int(),
        "slot_ids": torch.tensor([*slots, *[0] * padding_seqs], dtype=torch.int32),
        "num_seqs": torch.tensor([count], dtype=torch.int32),
        "T": int(starts[-1]) + padding_rows,
        "num_slots": num_slots,
    }


def sample_block_table(seq_lens: Tensor, block_size: int, generator: Generator) -> tuple[Tensor, int]:
    """A block table ``[B, MB]`` of blocks scattered through a pool, -1 where unused, and the pool's size."""
    needed = [-(-int(n) // block_size) for n in seq_lens]
    pool = sum(needed) + 2
    order = iter(torch.randperm(pool, generator=generator).tolist())
    table = torch.full((len(needed), max([*needed, 1])), -1, dtype=torch.int32)
    for b, count in enumerate(needed):
        table[b, :count] = torch.tensor([next(order) for _ in range(count)], dtype=torch.int32)
    return table, pool


def sample_positions(batch: dict[str, Any], spread: bool = False) -> Tensor:
    """MRoPE positions ``[3, T]``: all three axes equal (text), or ``spread`` apart as inside an image."""
    text = torch.zeros(batch["T"], dtype=torch.int32)
    starts = batch["query_start_loc"].tolist()
    for b in range(int(batch["num_seqs"])):
        length = starts[b + 1] - starts[b]
        end = int(batch["seq_lens"][b])
        text[starts[b] : starts[b + 1]] = torch.arange(end - length, end)
    axes = torch.stack([text, text, text])
    if spread:
        axes[1] += torch.arange(batch["T"]) % 5
        axes[2] += torch.arange(batch["T"]) % 7
    return axes.int()


def normal(generator: Generator, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    """Scaled standard normal values of ``dtype``."""
    return (torch.randn(*shape, generator=generator) * scale).to(dtype)


def gain(generator: Generator, size: int) -> Tensor:
    """A folded norm gain around one, float32."""
    return 1 + 0.2 * torch.randn(size, generator=generator)


def sample_nvfp4(
    generator: Generator, rows: int, columns: int, global_scales: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """An NVFP4 weight ``[N, K]`` of ``global_scales`` equal parts along N, whose sizes and so global scales differ.

    Returns the packed weight (``float4_e2m1fn_x2`` ``[N, K/2]``), its block scales ``[N, K/16]`` and the global scales.
    """
    parts = [
        quantize_nvfp4(normal(generator, rows // global_scales, columns, scale=(1 + 2 * part) * columns**-0.5))
        for part in range(global_scales)
    ]
    packed, block_scales, scales = zip(*parts, strict=True)
    return torch.cat(packed).view(torch.float4_e2m1fn_x2), torch.cat(block_scales), torch.stack(scales)


def sample_fp8(generator: Generator, rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """An FP8 weight ``[N, K]`` whose blocks have scales of their own ``[ceil(N/128), ceil(K/128)]``, subnormals too."""
    grid = -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)
    scales = (0.5 + torch.rand(grid, generator=generator)) * columns**-0.5
    return e4m3_from_float(normal(generator, rows, columns)), scales
