"""How two tensors that should be alike differ: a number, and words that tell a kernel's mistake from foreign data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qwen4exp_trt.plugins.number_formats import float_from_e4m3

_MOSTLY = 0.9
"""The share of what differs that has to be another tensor's to say so."""
_FEWEST = 8
"""Elements that have to agree for that: fewer may by chance."""


def row_error(expected: Tensor, got: Tensor) -> float:
    """The largest error of a row (of the last dim): RMS of the difference over that of the expected row, or of all rows
    where that is larger. So one wrong row among thousands shows. NaN if there is one; of integers, how many differ."""
    if not expected.is_floating_point():
        return float((expected != got).sum())
    if expected.numel() == 0:
        return 0.0
    expected, got = _float_rows(expected), _float_rows(got)
    norms = expected.norm(dim=1)
    scale = norms.clamp_min(norms.square().mean().sqrt()).clamp_min(1e-20)
    return float(((expected - got).norm(dim=1) / scale).max())


def describe_difference(expected: Tensor, got: Tensor, tolerance: float, others: Mapping[str, Tensor]) -> str:
    """Where ``got`` differs by more than ``tolerance`` of the typical value, and what is there instead.

    ``others``: what it may have been overwritten by, by name.
    """
    wrong = _differs(expected, got, tolerance)
    positions = wrong.flatten().nonzero().flatten()
    first = int(positions[0])
    place = tuple(int(i) for i in torch.unravel_index(positions[0], expected.shape))
    rows = wrong.reshape(-1, wrong.shape[-1] if wrong.dim() else 1).any(1)
    texts = [
        f"first at {_words(place)}: {_element(got, first)} instead of {_element(expected, first)}",
        f"{len(positions):,} of {wrong.numel():,} elements in {int(rows.sum()):,} of {len(rows):,} rows",
    ]
    return "; ".join(filter(None, (*texts, _instead(got, positions, others))))


def _differs(expected: Tensor, got: Tensor, tolerance: float) -> Tensor:
    if not expected.is_floating_point():
        return expected != got
    a, b = _float_rows(expected), _float_rows(got)
    wrong = ~((a - b).abs() <= tolerance * a.square().mean().sqrt())
    return (wrong if wrong.any() else a != b).view(expected.shape)


def _instead(got: Tensor, positions: Tensor, others: Mapping[str, Tensor]) -> str:
    """What is at ``positions`` of ``got``, if it is something special."""
    values = _plain(got).flatten()[positions]
    if values.is_floating_point() and bool(values.isnan().all()):
        return "NaN, as was there before the step: maybe nothing was written"
    if not values.is_floating_point() and bool((values == torch.iinfo(values.dtype).min).all()):
        return "what was there before the step: nothing was written"
    if bool((values == values[0]).all()) and len(values) >= _FEWEST:
        return "all zeros" if values[0] == 0 else f"all {values[0].item():g}"
    names = [name for name, other in others.items() if _is_from(got, positions, other)]
    if not names:
        return ""
    return f"it is what {' and '.join(names)} has at the same place, so memory is used twice or an address is wrong"


def _is_from(got: Tensor, positions: Tensor, other: Tensor) -> bool:
    """Whether ``other`` has the bytes that ``got`` has at ``positions``, counted in bytes from the front."""
    size, theirs = got.element_size(), other.contiguous().view(-1).view(torch.uint8)
    ours = got.contiguous().view(-1).view(torch.uint8)
    common = positions[(positions + 1) * size <= len(theirs)]
    index = (common[:, None] * size + torch.arange(size, device=common.device)).flatten()
    num_same = int((ours[index] == theirs[index]).view(-1, size).all(1).sum())
    return num_same >= max(_FEWEST, _MOSTLY * len(positions))


def _float_rows(value: Tensor) -> Tensor:
    value = _plain(value).float()
    return value.reshape(-1, value.shape[-1] if value.dim() else 1)


def _plain(value: Tensor) -> Tensor:
    """In a dtype that torch computes in."""
    return float_from_e4m3(value) if value.dtype == torch.float8_e4m3fn else value


def _element(value: Tensor, index: int) -> str:
    element: Any = _plain(value).flatten()[index].item()
    return f"{element:.4g}" if isinstance(element, float) and math.isfinite(element) else str(element)


def _words(place: tuple[int, ...]) -> str:
    return f"row {place[0]}, column {place[1]}" if len(place) == 2 else str(list(place))
