"""Float32 building blocks shared by the CPU bodies."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rms_norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    """``x * rsqrt(mean(x^2) + eps) * gain`` over the last dim, in float32. ``gain`` broadcasts."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain.float()


def grouped_rms_norm(x: Tensor, gain: Tensor, num_groups: int, eps: float) -> Tensor:
    """RMSNorm of each of ``num_groups`` equal parts of the last dim, ``[T, W]`` -> float32 ``[T, W]``."""
    grouped = x.unflatten(-1, (num_groups, -1))
    return rms_norm(grouped, gain.unflatten(-1, (num_groups, -1)), eps).flatten(-2)


def rotary_angles(positions: Tensor, inv_freq: Tensor, mrope_section: Sequence[int]) -> Tensor:
    """Angles of interleaved MRoPE: ``positions`` ``[3, ...]`` (temporal, height, width) -> float32 ``[..., R/2]``.

    Frequency i follows the height axis when ``i % 3 == 1`` and ``i < 3 * mrope_section[1]``, the width axis when
    ``i % 3 == 2`` and ``i < 3 * mrope_section[2]``, and the temporal axis otherwise.
    """
    index = torch.arange(len(inv_freq))
    axis = torch.zeros_like(index)
    for which in (1, 2):
        axis[(index % 3 == which) & (index < 3 * mrope_section[which])] = which
    return positions[axis].movedim(0, -1).float() * inv_freq


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """NeoX rotation of the first ``2 * angles.shape[-1]`` dims of float32 ``x`` ``[..., D]``; the rest passes."""
    half = angles.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def dilated_causal_conv(extended: Tensor, weight: Tensor, dilation: int) -> Tensor:
    """Depthwise causal convolution in float32: ``extended`` ``[B, (K-1)*dilation + L, C]`` -> ``[B, L, C]``."""
    kernel_size = weight.shape[1]
    length = extended.shape[1] - (kernel_size - 1) * dilation
    taps = [
        extended[:, j * dilation : j * dilation + length].float() * weight[:, j].float() for j in range(kernel_size)
    ]
    return torch.stack(taps).sum(0)


def gather_pages(cache: Tensor, block_table: Tensor, num_seqs: int) -> Tensor:
    """Paged rows of each sequence: ``cache`` ``[NB, P, ...]`` -> ``[num_seqs, MB * P, ...]``.

    A table entry of -1 reads block 0, whose rows the caller masks.
    """
    return cache[block_table[:num_seqs].long().clamp_min(0)].flatten(1, 2)
