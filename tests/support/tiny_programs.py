"""Programs of a few ops for the tests of passes, each traced from a module of a few lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qwen4exp_trt.frontend.export import trace_program
from qwen4exp_trt.passes.base import Pass, PassManager, PassResult
from qwen4exp_trt.passes.verification import SampleSteps, Verifier, random_source
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.plugins.sample_batches import sample_batch
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.program_text import format_program
from qwen4exp_trt.runtime.specs import NUM_SLOTS, Dim, StateKind, StateSpec, TensorSpec, extent_of
from qwen4exp_trt.runtime.tensor_source import TensorFunction
from qwen4exp_trt.runtime.weights import dtype_from_name

BATCH = tuple(
    TensorSpec(name, shape, "int32")
    for name, shape in (
        ("query_start_loc", ("B_plus_1",)),
        ("seq_lens", ("B",)),
        ("slot_ids", ("B",)),
        ("num_seqs", (1,)),
    )
)
"""The metadata inputs of an op with a per-sequence state, in the order in which such ops take them."""

_STEPS = ([1], [3, 1], [2, 5, 1])
"""New tokens of each sequence in the sample steps; every sequence has two tokens of context."""


def floats(**shapes: tuple[Dim, ...]) -> tuple[TensorSpec, ...]:
    """Float32 inputs."""
    return tuple(TensorSpec(name, shape, "float32") for name, shape in shapes.items())


def conv_state(*row: int) -> StateSpec:
    """A per-sequence state of rows of shape ``row``."""
    return StateSpec("block.conv_state", StateKind.CONV_STATE, 0, (NUM_SLOTS, *row), "float32")


def trace(model: nn.Module, inputs: Sequence[TensorSpec], states: Sequence[StateSpec] = ()) -> Program:
    """``model(*inputs, states)`` as a program whose outputs are ``out_0``, ``out_1`` ..."""
    all_specs()
    program = trace_program(model, tuple(inputs), tuple(states), (), {})
    results: Any = program.graph.output_node().args[0]
    dims: dict[str, Any] = {**program.dim_names()}
    program.outputs = tuple(
        TensorSpec(f"out_{i}", tuple(dims.get(str(d), d) for d in value.shape), str(value.dtype).removeprefix("torch."))
        for i, value in enumerate(node.meta["val"] for node in results)
    )
    return program


def sample_steps(program: Program) -> SampleSteps:
    """Steps of one, two and three packed sequences with random values for the inputs that are not metadata."""
    generator, steps = torch.Generator().manual_seed(0), []
    for query_lens in _STEPS:
        batch = sample_batch(query_lens, [2] * len(query_lens))
        dims = {"T": batch["T"]}
        values = {
            spec.name: _random_values(spec, [extent_of(dim, dims) for dim in spec.shape], generator)
            for spec in program.inputs
            if spec.name not in batch
        }
        steps.append(values | {spec.name: batch[spec.name] for spec in program.inputs if spec.name in batch})
    return SampleSteps(tuple(steps), {NUM_SLOTS: len(_STEPS[-1]) + 3})


def _random_values(spec: TensorSpec, shape: list[int], generator: torch.Generator) -> Tensor:
    """Normal, or ids below 4."""
    dtype = dtype_from_name(spec.dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(4, shape, generator=generator, dtype=dtype)


def verifier_for(program: Program, source: TensorFunction | None = None) -> Verifier:
    return Verifier([sample_steps(program)], source or random_source(program.weights))


def run_pass(graph_pass: Pass, program: Program, source: TensorFunction | None = None) -> tuple[Program, PassResult]:
    """Run one pass under the manager, executed before and after; with random weights unless ``source`` has them."""
    after, results = PassManager([graph_pass], verifier_for(program, source)).run(program)
    return after, results[0]


def body_of(program: Program) -> str:
    """The ops and the return of the program's text."""
    return format_program(program).split("):\n", 1)[1]


def assert_rewritten(
    graph_pass: Pass, program: Program, expected: str, rewrites: int = 1, source: TensorFunction | None = None
) -> Program:
    """The pass does ``rewrites`` rewrites and leaves the text ``expected``, and nothing when it runs again."""
    after, result = run_pass(graph_pass, program, source)
    assert body_of(after) == expected.lstrip("\n")
    assert result.rewrites == rewrites
    again, (second,) = PassManager([graph_pass]).run(after)
    assert (second.rewrites, format_program(again)) == (0, format_program(after))
    return after


def assert_untouched(graph_pass: Pass, program: Program, source: TensorFunction | None = None) -> None:
    """The pass finds nothing to do."""
    after, result = run_pass(graph_pass, program, source)
    assert result.rewrites == 0
    assert format_program(after) == format_program(program)
    assert after.tables == program.tables
