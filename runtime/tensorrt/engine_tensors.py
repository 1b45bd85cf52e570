"""The network inputs and outputs of an engine, compared with what its program says they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.plugins.spec import element_shape
from qwen4exp_trt.plugins.tensorrt import torch_dtypes
from qwen4exp_trt.runtime.checkpoint import listing
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.specs import StateSpec, TensorSpec
from qwen4exp_trt.runtime.weights import dtype_from_name

_DYNAMIC = -1


@dataclass(frozen=True)
class IOTensor:
    """A tensor of an engine; the shape counts elements and has -1 for dynamic dims."""

    is_input: bool
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{'input' if self.is_input else 'output'} {self.dtype} {list(self.shape)}"


def check_io_tensors(
    folder: Path, trt: ModuleType, engine: Any, program: Program, debug_outputs: Iterable[TensorSpec] = ()
) -> None:
    """`BundleError` naming every tensor that the engine or the program lacks, or that they have differently."""
    expected, found = program_tensors(program, debug_outputs), engine_tensors(trt, engine)
    problems = []
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            problems.append(f"{name} is {found.get(name, 'absent')}, expected {expected.get(name, 'none')}")
    if problems:
        raise BundleError(f"{folder}: the engine's tensors are not the program's: {listing(problems)}; build it again")


def check_profiles(folder: Path, engine: Any, profiles: Mapping[str, Mapping[str, Sequence[Sequence[int]]]]) -> None:
    """`BundleError` naming every range that the engine's profiles have otherwise than ``profiles``, the manifest's: it
    is by these that a step's profile is chosen."""
    if engine.num_optimization_profiles != len(profiles):
        raise BundleError(
            f"{folder}: the engine has {engine.num_optimization_profiles} profiles, the manifest "
            f"{', '.join(profiles)}; build it again"
        )
    problems = []
    for index, (profile, ranges) in enumerate(profiles.items()):
        for name, expected in ranges.items():
            low, _, high = ([*shape] for shape in engine.get_tensor_profile_shape(name, index))
            if [low, high] != [[*expected[0]], [*expected[2]]]:
                problems.append(f"{name} is {low} to {high} in {profile}, not {[*expected[0]]} to {[*expected[2]]}")
    if problems:
        raise BundleError(
            f"{folder}: the engine's profiles are not the manifest's: {listing(problems)}; build it again"
        )


def engine_tensors(trt: ModuleType, engine: Any) -> dict[str, IOTensor]:
    """The I/O tensors of an engine by name."""
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    dtypes = torch_dtypes(trt)
    return {
        name: IOTensor(
            engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT,
            str(dtypes.get(engine.get_tensor_dtype(name), engine.get_tensor_dtype(name))).removeprefix("torch."),
            tuple(engine.get_tensor_shape(name)),
        )
        for name in names
    }


def program_tensors(program: Program, debug_outputs: Iterable[TensorSpec] = ()) -> dict[str, IOTensor]:
    """What the engine of a program has. In: inputs, states, weights. Out: outputs, updated states, marked values."""
    inputs = (*program.inputs, *program.states, *(weight.tensor for weight in program.weights))
    expected = {spec.name: _io_tensor(spec, is_input=True) for spec in inputs}
    expected |= {spec.name: _io_tensor(spec, is_input=False) for spec in (*program.outputs, *debug_outputs)}
    return expected | {spec.out_name: _io_tensor(spec, is_input=False) for spec in program.states}


def _io_tensor(spec: TensorSpec | StateSpec, is_input: bool) -> IOTensor:
    static = [_DYNAMIC if isinstance(dim, str) else dim for dim in spec.shape]
    return IOTensor(is_input, spec.dtype, tuple(element_shape(static, dtype_from_name(spec.dtype))))
