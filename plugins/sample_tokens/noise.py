"""Exponential noise of a token of a draw, from the counter-based generator Philox4x32-10."""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF
_LARGEST_BELOW_ONE = 1 - 2.0**-24


Word = int | Tensor


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Word, Word]) -> tuple[Tensor, ...]:
    """Ten rounds over int64 tensors of 32-bit words."""
    a, b, c, d = counter
    k, l = key  # noqa: E741
    for _ in range(10):
        # Products of 32 bits by 32 wrap in int64, which leaves both halves right.
        low, high = [_MULTIPLIERS[0] * a, _MULTIPLIERS[1] * c], [None, None]
        high = [(product >> 32) & _MASK for product in low]
        low = [product & _MASK for product in low]
        a, b, c, d = high[1] ^ b ^ k, low[1], high[0] ^ d ^ l, low[0]
        k, l = (k + _KEY_STEPS[0]) & _MASK, (l + _KEY_STEPS[1]) & _MASK  # noqa: E741
    return a, b, c, d


def exponential_noise(seed: Word, offset: Word, token_ids: Tensor) -> Tensor:
    """Standard exponential noise, float32, of ``token_ids`` (int64) in draw ``offset`` of a request with ``seed``.

    ``seed`` and ``offset``: one for all, or int64 tensors with one for each of ``token_ids``.

    Word ``id % 4`` of the block that the seed gives for the counter ``(id // 4, offset, 0, 0)``.
    """
    zero = torch.zeros_like(token_ids)
    blocks = philox((token_ids // 4, zero + (offset & _MASK), zero, zero), (seed & _MASK, seed >> 32 & _MASK))
    words = torch.stack(blocks).gather(0, (token_ids % 4)[None])[0]
    # The small values, which win, are the fine ones.
    uniform = ((words.float() + 0.5) * 2.0**-32).clamp_max(_LARGEST_BELOW_ONE)
    return -torch.log1p(-uniform)
