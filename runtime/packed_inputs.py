"""The inputs of a step in one buffer, padded to fixed sizes, so that one copy brings them to a GPU.

Those that are on the GPU already, such as the stacks that a draft head takes, are copied there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qwen4exp_trt.runtime.limits import DRAFT_ROWS, EngineLimits
from qwen4exp_trt.runtime.specs import STACK, TensorSpec, extent_of
from qwen4exp_trt.runtime.weights import dtype_from_name

_ALIGNMENT = 256
"""Of an input in the buffer, in bytes."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""What NumPy copies in place of floats: it has no BF16."""
_ROWS_LADDER = (1, 2, 4, DRAFT_ROWS)
"""Rows a sequence of the steps that are captured."""


@dataclass(frozen=True)
class StepShape:
    """Sizes of a step: sequences, tokens, rows of logits, and columns of the block table."""

    num_seqs: int
    num_tokens: int
    num_rows: int
    num_pages: int

    @classmethod
    def of(cls, inputs: Mapping[str, Tensor]) -> StepShape:
        """The sizes of these inputs."""
        num_seqs, num_pages = inputs["block_table"].shape
        return cls(num_seqs, len(inputs["input_ids"]), len(inputs["logits_indices"]), num_pages)

    @property
    def dims(self) -> dict[str, int]:
        """The extents of the dynamic dims of inputs and outputs."""
        return {
            "T": self.num_tokens,
            "B": self.num_seqs,
            "B_plus_1": self.num_seqs + 1,
            "L": self.num_rows,
            "max_blocks": self.num_pages,
        }


def captured_shape(inputs: Mapping[str, Tensor], limits: EngineLimits) -> StepShape | None:
    """The sizes that a decode step is padded to; None for a step with a sequence of more than `DRAFT_ROWS` tokens.

    Few sizes serve all steps: batches of a power of two (or the largest), a power of two of rows a sequence, logits of
    one row a sequence or of all rows, and the block table of the longest sequence.
    """
    lengths = np.diff(inputs["query_start_loc"].numpy())
    if lengths.max() > DRAFT_ROWS:
        return None
    num_seqs = min(1 << (len(lengths) - 1).bit_length(), limits.max_batch_size)
    num_tokens = next(num_seqs * rows for rows in _ROWS_LADDER if num_seqs * rows >= lengths.sum())
    num_rows = num_seqs if len(inputs["logits_indices"]) <= num_seqs else num_tokens
    return StepShape(num_seqs, num_tokens, num_rows, limits.blocks_per_seq)


class InputLayout:
    """Where each input of steps of one shape is in a buffer of bytes."""

    def __init__(self, specs: Sequence[TensorSpec], shape: StepShape) -> None:
        self._places: dict[str, _Place] = {}
        self.num_bytes = 0
        """Of the buffer."""
        for spec in sorted(specs, key=lambda spec: spec.name == STACK):  # last, as it is large and seldom on the CPU
            end = self.num_bytes + spec.num_bytes(shape.dims)
            extents = tuple(extent_of(dim, shape.dims) for dim in spec.shape)
            self._places[spec.name] = _Place(slice(self.num_bytes, end), dtype_from_name(spec.dtype), extents)
            self.num_bytes = -(-end // _ALIGNMENT) * _ALIGNMENT

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The inputs in ``buffer`` (uint8)."""
        return {name: buffer[place.bytes].view(place.dtype).view(place.extents) for name, place in self._places.items()}

    def packed_bytes(self, inputs: Mapping[str, Tensor]) -> int:
        """How much of the buffer `pack` needs: up to the last of the ``inputs`` that are on the CPU."""
        return max(place.bytes.stop for name, place in self._places.items() if inputs[name].device.type == "cpu")

    def pack(self, inputs: Mapping[str, Tensor], buffer: Tensor) -> None:
        """Write those of ``inputs`` that are on the CPU into ``buffer`` (likewise), behind them what pads a step to the
        shape.

        Padding sequences have no rows, no tokens and no pages; ``num_seqs`` of the inputs does not count them.
        """
        elements = buffer.numpy()
        for name, place in self._places.items():
            if inputs[name].device.type != "cpu":
                elements[place.bytes] = 0  # what pads it; the rest is copied on the GPU
                continue
            source = inputs[name].view(_BITS[place.dtype.itemsize]).numpy()
            target = elements[place.bytes].view(source.dtype).reshape(place.extents)
            if source.shape != place.extents:
                target[...] = _padding(name, source)
            target[tuple(slice(extent) for extent in source.shape)] = source

    def copy_on_device(self, inputs: Mapping[str, Tensor], buffer: Tensor) -> None:
        """Copy those of ``inputs`` that are on the GPU into ``buffer`` there. Rows of padding stay what they are."""
        views = self.views(buffer)
        for name, value in inputs.items():
            if name in views and value.device.type != "cpu":
                views[name][tuple(slice(extent) for extent in value.shape)].copy_(value)

    def padding(self) -> Tensor:
        """A buffer (on the CPU) of a step that is padding only: it changes no state."""
        buffer = torch.zeros(self.num_bytes, dtype=torch.uint8)
        self.views(buffer)["block_table"].fill_(-1)
        return buffer


@dataclass(frozen=True)
class _Place:
    """Of an input in a buffer."""

    bytes: slice
    dtype: torch.dtype
    extents: tuple[int, ...]


def _padding(name: str, source: np.ndarray) -> int:
    match name:
        case "query_start_loc":
            return source[-1]
        case "block_table":
            return -1
        case _:
            return 0
