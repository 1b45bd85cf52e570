"""The inputs of a step in one buffer, padded to fixed sizes, so that one copy brings them to a GPU.

Those that are on the GPU already, such as the stacks that a draft head takes, are copied there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import lt

import numpy as np
import torch
from torch import Tensor

from qwen4exp_trt.runtime.limits import DRAFT_ROWS, EngineLimits
from qwen4exp_trt.runtime.specs import STACK, TensorSpec, extent_of
from qwen4exp_trt.runtime.weights import dtype_from_name

_ALIGNMENT = 256
"""Of an input in the buffer, in bytes."""
_BITS = {2: np.int16, 4: np.int32, 8: np.int64}
"""What is copied in place of floats, by the bytes of an element."""
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
    starts = inputs["query_start_loc"].numpy()
    if (starts[1:] - starts[:-1]).max() > DRAFT_ROWS:
        return None
    num_seqs = min(1 << (len(starts) - 2).bit_length(), limits.max_batch_size)
    num_tokens = next(num_seqs * rows for rows in _ROWS_LADDER if num_seqs * rows >= starts[-1])
    num_rows = num_seqs if len(inputs["logits_indices"]) <= num_seqs else num_tokens
    return StepShape(num_seqs, num_tokens, num_rows, limits.blocks_per_seq)


class InputLayout:
    """Where each input of steps of one shape is in a buffer of bytes."""

    def __init__(self, specs: Sequence[TensorSpec], shape: StepShape) -> None:
        self.places: dict[str, _Place] = {}
        self.num_bytes = 0
        """Of the buffer."""
        for spec in sorted(specs, key=lambda spec: spec.name == STACK):  # last, as it is large and seldom on the CPU
            end = self.num_bytes + spec.num_bytes(shape.dims)
            extents = tuple(extent_of(dim, shape.dims) for dim in spec.shape)
            self.places[spec.name] = _Place(slice(self.num_bytes, end), dtype_from_name(spec.dtype), extents)
            self.num_bytes = -(-end // _ALIGNMENT) * _ALIGNMENT

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The inputs in ``buffer`` (uint8)."""
        return {name: self._view(name, buffer) for name in self.places}

    def _view(self, name: str, buffer: Tensor) -> Tensor:
        place = self.places[name]
        return buffer[place.bytes].view(place.dtype).view(place.extents)

    def copy_on_device(self, name: str, value: Tensor, buffer: Tensor) -> None:
        """Copy an input that is on the GPU into ``buffer`` there. Rows of padding stay what they are."""
        self._view(name, buffer)[tuple(slice(extent) for extent in value.shape)].copy_(value)

    def padding(self) -> Tensor:
        """A buffer (on the CPU) of a step that is padding only: it changes no state."""
        buffer = torch.zeros(self.num_bytes, dtype=torch.uint8)
        self.views(buffer)["block_table"].fill_(-1)
        return buffer


class StagedInputs:
    """The inputs of one step after another in a buffer on the CPU.

    The time of the host that a step takes is the number of inputs, so views and padding of the last step are kept.
    """

    def __init__(self, layout: InputLayout, buffer: Tensor) -> None:
        self.buffer, elements = buffer, buffer.numpy()
        self._targets = [
            (name, elements[place.bytes].view(_BITS[place.dtype.itemsize]).reshape(place.extents), place.bytes.stop)
            for name, place in layout.places.items()
        ]
        self._filled: dict[str, tuple[int, ...]] = {}
        """The extents of the last step's inputs; behind them is padding."""

    def pack(self, inputs: Mapping[str, Tensor]) -> tuple[int, list[str]]:
        """Write those of ``inputs`` that are on the CPU, behind them what pads a step to the layout's shape.

        Padding sequences have no rows, no tokens and no pages; ``num_seqs`` of the inputs does not count them. Returns
        where in the buffer the last of them ends, and which inputs are on a GPU instead.
        """
        end, elsewhere = 0, list[str]()
        for name, target, stop in self._targets:
            value = inputs[name]
            if not value.is_cpu:
                if self._filled.get(name) != ():
                    target[...], self._filled[name] = 0, ()
                elsewhere.append(name)
                continue
            end = stop
            # NumPy has no BF16.
            bits = (value.view(torch.int16) if value.dtype is torch.bfloat16 else value).numpy()
            shape, filled = bits.shape, self._filled.get(name)
            if bits.dtype != target.dtype:
                bits = bits.view(target.dtype)
            if shape == target.shape:
                target[...] = bits
            else:
                if filled is None or name == "query_start_loc" or not filled or any(map(lt, shape, filled)):
                    target[...] = _padding(name, bits)
                target[tuple(map(slice, shape))] = bits
            self._filled[name] = shape
        return end, elsewhere


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
