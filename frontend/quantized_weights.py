"""The formats in which checkpoints store a weight: told apart by its dtype and by the scales beside it.

What a config says about quantization only has to be known (`check_quantization_config`): releases mix formats from
tensor to tensor, and their configs do not always say so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen4exp_trt.errors import CheckpointError
from qwen4exp_trt.frontend.stored_weights import Shape
from qwen4exp_trt.plugins.number_formats import FP8_BLOCK, NVFP4_BLOCK
from qwen4exp_trt.runtime.weight_formats import Part, WeightFormat

INPUT_SCALE = "input_scale"
"""Beside a quantized weight, for quantizing the activations that meet it; the weight does not depend on it."""


@dataclass(frozen=True)
class ScaleFormat:
    """A tensor of scales: ``{module}.{suffix}`` beside ``{module}.weight``."""

    part: Part
    suffix: str
    dtypes: tuple[str, ...]
    shapes: Callable[[Shape], tuple[Shape, ...]]
    """The shape of the part, and others of as many elements that checkpoints have, from the shape of the weight."""
    is_read_at_once: bool = True
    """Whether the values are checked with the headers; those of large ones are when they are read."""


@dataclass(frozen=True)
class StoredFormat:
    """How the dtypes of the weight's tensor and its scales make up a format."""

    format: WeightFormat
    dtypes: tuple[str, ...]
    scales: tuple[ScaleFormat, ...] = ()
    values_per_element: int = 1
    """Weights in one element along K."""

    def unpacked_shape(self, stored: Shape) -> Shape:
        return (*stored[:-1], stored[-1] * self.values_per_element) if self.values_per_element > 1 else stored


def _scalar(shape: Shape) -> tuple[Shape, ...]:
    return (1,), ()


def _fp8_grid(shape: Shape) -> tuple[Shape, ...]:
    """One scale a block of rows and columns; modelopt keeps the dims that it reduced."""
    rows, columns = (-(-extent // FP8_BLOCK) for extent in shape)
    return (rows, columns), (rows, 1, columns, 1)


def _nvfp4_blocks(shape: Shape) -> tuple[Shape, ...]:
    return ((shape[0], shape[1] // NVFP4_BLOCK),)


_SCALE_DTYPES = ("BF16", "F32")

FORMATS = (
    StoredFormat(WeightFormat.FLOAT, ("BF16", "F16", "F32")),
    StoredFormat(
        WeightFormat.FP8_BLOCKS,
        ("F8_E4M3",),
        (ScaleFormat(Part.SCALES, "weight_scale_inv", _SCALE_DTYPES, _fp8_grid),),
    ),
    StoredFormat(WeightFormat.FP8, ("F8_E4M3",), (ScaleFormat(Part.SCALES, "weight_scale", _SCALE_DTYPES, _scalar),)),
    StoredFormat(
        WeightFormat.FP8_BLOCKS, ("F8_E4M3",), (ScaleFormat(Part.SCALES, "weight_scale", _SCALE_DTYPES, _fp8_grid),)
    ),
    StoredFormat(
        WeightFormat.NVFP4,
        ("U8",),
        (
            ScaleFormat(Part.BLOCK_SCALES, "weight_scale", ("F8_E4M3",), _nvfp4_blocks, is_read_at_once=False),
            ScaleFormat(Part.SCALES, "weight_scale_2", ("F32",), _scalar),
        ),
        values_per_element=2,
    ),
)
"""Only matrices are stored in the formats with scales."""

SCALE_SUFFIXES = tuple(dict.fromkeys(scale.suffix for form in FORMATS for scale in form.scales))


def formats_for(stored: Shape) -> list[StoredFormat]:
    """The formats that a tensor of this shape may have."""
    return [form for form in FORMATS if len(stored) == 2 or not form.scales]


def missing_suffixes(form: StoredFormat, scale: ScaleFormat) -> list[str]:
    """The suffixes of which one is needed where ``scale`` is missing: formats of one dtype differ by their first."""
    if scale is not form.scales[0]:
        return [scale.suffix]
    return list(dict.fromkeys(other.scales[0].suffix for other in FORMATS if other.dtypes == form.dtypes))


def choose_format(dtype: str, stored: Shape, scale_shapes: Mapping[str, Shape]) -> StoredFormat | None:
    """The format of a tensor with these scales (by suffix) beside it; None for a dtype that no format stores.

    Of the formats of its dtype it is the one that the scales fit best, so that its rules say what is wrong with them.
    """
    candidates = [form for form in formats_for(stored) if dtype in form.dtypes]

    def num_fitting(form: StoredFormat) -> int:
        shape = form.unpacked_shape(stored)
        present = [scale for scale in form.scales if scale.suffix in scale_shapes]
        return len(present) + sum(scale_shapes[scale.suffix] in scale.shapes(shape) for scale in present)

    return max(candidates, key=num_fitting, default=None)


# --- what configs say -----------------------------------------------------------------------------------------------

_CONFIG_FILES = ("config.json", "hf_quant_config.json")
_KNOWN = {
    "quant_method": ("fp8", "modelopt", "modelopt_fp4", "modelopt_mixed"),
    "quant_algo": ("FP8", "FP8_PB_WO", "FP8_BLOCK_SCALES", "NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"),
}
"""Key of a quantization config -> the values whose weights are in `FORMATS`."""


def check_quantization_config(folder: Path) -> None:
    """Raise `CheckpointError` if a config file of the checkpoint names a quantization that is not in `FORMATS`."""
    for path in (folder / name for name in _CONFIG_FILES):
        if path.is_file():
            _check_names(path)


def _check_names(path: Path) -> None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from error
    for key, value in _named_quantizations(data):
        if value not in _KNOWN[key]:
            raise CheckpointError(
                f"{path}: {key} is {value!r}; the weights of {', '.join(_KNOWN[key])} can be read, so give a BF16, "
                "FP8 or NVFP4 checkpoint of the model"
            )


def _named_quantizations(data: Any) -> Iterator[tuple[str, Any]]:
    """The ``quant_method`` and ``quant_algo`` values anywhere in a config, null left out."""
    if isinstance(data, list):
        for item in data:
            yield from _named_quantizations(item)
    elif isinstance(data, dict):
        for key, value in data.items():
            if key in _KNOWN and value is not None:
                yield key, value
            else:
                yield from _named_quantizations(value)
