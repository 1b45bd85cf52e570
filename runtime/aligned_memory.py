"""Memory that begins where TensorRT wants it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

ALIGNMENT = 256
"""Bytes; of every tensor that an engine is given. Memory that torch has from CUDA always is; the host's is not."""


def aligned_empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """`torch.empty` that begins at a multiple of `ALIGNMENT`, as its storage does, which is no larger.

    What asks CUDA about a tensor (`Tensor.is_pinned`) asks for the beginning of its storage.
    """
    if torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    count = math.prod(shape)
    memory = torch.empty(count + ALIGNMENT // dtype.itemsize, dtype=dtype)
    start = -memory.data_ptr() % ALIGNMENT
    storage = torch.from_numpy(memory.view(torch.uint8).numpy()[start : start + count * dtype.itemsize])
    return storage.view(dtype).view(*shape)
