"""What an engine is given by address: checked by us first, since TensorRT would take almost anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.plugins.spec import element_shape
from qwen4exp_trt.runtime.aligned_memory import ALIGNMENT
from qwen4exp_trt.runtime.checkpoint import listing
from qwen4exp_trt.runtime.packed_inputs import StepShape
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.specs import NUM_BLOCKS, NUM_SLOTS, STEP_DIMS, StateSpec, TensorSpec, extent_of
from qwen4exp_trt.runtime.weights import dtype_from_name

Shape = Sequence[int]
ProfileRanges = Mapping[str, Sequence[Shape]]
"""Of one profile, by the name of a tensor: its smallest, typical and largest shape."""


class Bindings:
    """The addresses of one engine that no step changes: states, weights and outputs of ``program``, and the values
    between its layers that are ``debug_outputs``.

    `BundleError` that names every tensor which is missing, or not as the program's tables and the profiles say.
    """

    def __init__(
        self,
        program: Program,
        tensors: Mapping[str, Tensor],
        profiles: Mapping[str, ProfileRanges],
        device: torch.device,
        debug_outputs: Sequence[TensorSpec] = (),
    ) -> None:
        outputs = (*program.outputs, *debug_outputs)
        self._program, self._device, self._profiles = program, device, profiles
        problems = []
        pools = _pool_extents(program, tensors)
        for spec in (*program.states, *(weight.tensor for weight in program.weights), *outputs):
            if spec.name not in tensors:
                problems.append(f"{spec.name} is missing")
                continue
            tensor, expected = tensors[spec.name], _static_shape(spec, pools)
            problems += _problems(spec.name, tensor, spec.dtype, expected, device)
            shape = element_shape(tensor.shape, tensor.dtype)
            outside = [name for name, ranges in profiles.items() if not _is_within(shape, ranges.get(spec.name))]
            if outside:
                problems.append(f"{spec.name} is {shape}, outside the profiles {', '.join(outside)}")
        if problems:
            raise BundleError(f"the engine cannot be given its tensors: {listing(problems)}")
        self.addresses = {spec.name: tensors[spec.name].data_ptr() for spec in (*outputs, *program.states)}
        self.addresses |= {weight.name: tensors[weight.name].data_ptr() for weight in program.weights}
        # Updated in place.
        self.addresses |= {spec.out_name: tensors[spec.name].data_ptr() for spec in program.states}
        self.shapes = {
            spec.name: tuple(element_shape(tensors[spec.name].shape, tensors[spec.name].dtype))
            for spec in program.states
        }
        """Of the inputs among them with dynamic dims."""

    def check_step(self, inputs: Mapping[str, Tensor]) -> str:
        """The first profile that holds a step of ``inputs``; `BundleError` for one that no profile does, or whose
        tensors are not as the program's tables say."""
        missing = [spec.name for spec in self._program.inputs if spec.name not in inputs]
        if missing:
            raise BundleError(f"a step lacks the inputs {', '.join(missing)}")
        dims, problems = StepShape.of(inputs).dims, []
        for spec in self._program.inputs:
            expected = tuple(extent_of(dim, dims) for dim in spec.shape)
            problems += _problems(spec.name, inputs[spec.name], spec.dtype, expected, self._device)
        if problems:
            raise BundleError(f"the engine cannot be given a step: {listing(problems)}")
        return self.profile_for({spec.name: tuple(inputs[spec.name].shape) for spec in self._program.inputs})

    def profile_for(self, shapes: Mapping[str, Shape]) -> str:
        """The first profile whose ranges hold ``shapes`` by name."""
        for profile, ranges in self._profiles.items():
            if all(_is_within(shape, ranges.get(name)) for name, shape in shapes.items()):
                return profile
        found = {name: list(shape) for name, shape in shapes.items()}
        raise BundleError(f"no profile of the engine ({', '.join(self._profiles)}) holds a step of the shapes {found}")


def is_bindable(tensor: Tensor) -> bool:
    """Whether its memory can be given to an engine as it is."""
    return tensor.is_contiguous() and tensor.data_ptr() % ALIGNMENT == 0


def bind(context: Any, addresses: Mapping[str, int], shapes: Mapping[str, Shape]) -> str | None:
    """Give an execution context addresses and shapes; what TensorRT refused, if anything."""
    for name, shape in shapes.items():
        if not context.set_input_shape(name, tuple(shape)):
            return f"set the shape of {name} to {list(shape)}"
    for name, address in addresses.items():
        if not context.set_tensor_address(name, address):
            return f"bind {name}"
    return None


def _pool_extents(program: Program, tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """How many pages and slots there are: of the first state of each kind, which the others must agree with."""
    pools: dict[str, int] = {}
    for spec in program.states:
        if spec.name in tensors and tensors[spec.name].ndim:
            pools.setdefault(NUM_BLOCKS if spec.is_paged else NUM_SLOTS, len(tensors[spec.name]))
    return pools


def _static_shape(spec: TensorSpec | StateSpec, pools: Mapping[str, int]) -> tuple[int | None, ...]:
    """None for the dim that steps share, which is as large as it is."""
    return tuple(None if dim in STEP_DIMS else extent_of(dim, pools) for dim in spec.shape)


def _problems(name: str, tensor: Tensor, dtype: str, shape: Sequence[int | None], device: torch.device) -> list[str]:
    """In what ``tensor`` is not what it should be."""
    found = []
    fits = len(shape) == tensor.ndim and all(n is None or n == m for n, m in zip(shape, tensor.shape, strict=True))
    if tensor.dtype != dtype_from_name(dtype) or not fits:
        expected = [dim if dim is not None else "any" for dim in shape]
        found.append(f"{name} is {str(tensor.dtype)[6:]} {list(tensor.shape)}, expected {dtype} {expected}")
    if tensor.device != device and not tensor.is_pinned():
        found.append(f"{name} is on {tensor.device}, expected {device}")
    if not tensor.is_contiguous():
        found.append(f"{name} is not contiguous")
    if tensor.data_ptr() % ALIGNMENT:
        found.append(f"{name} is at {tensor.data_ptr():#x}, expected a multiple of {ALIGNMENT}")
    if tensor.numel() and not tensor.data_ptr():
        found.append(f"{name} has no memory")
    return found


def _is_within(shape: Shape, shape_range: Sequence[Shape] | None) -> bool:
    """Whether a profile holds it; a tensor without a range is static."""
    if shape_range is None:
        return True
    smallest, _, largest = shape_range
    return len(shape) == len(smallest) and all(
        low <= extent <= high for low, extent, high in zip(smallest, shape, largest, strict=True)
    )
