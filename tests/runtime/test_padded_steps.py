"""A step that is padded to a captured shape does what it does unpadded: here on the CPU, by the ops' CPU bodies."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from packed_steps import STEPS
from serving import loaded_backend
from torch import Tensor

from qwen4exp_trt.runtime import LLM
from qwen4exp_trt.runtime.packed_inputs import InputLayout, StagedInputs, StepShape, captured_shape
from qwen4exp_trt.runtime.program_backend import ProgramBackend


def padded(backend: ProgramBackend, inputs: Mapping[str, Tensor], shape: StepShape) -> dict[str, Tensor]:
    """``inputs`` as a graph of ``shape`` gets them."""
    layout = InputLayout(backend.program.inputs, shape)
    buffer = torch.full((layout.num_bytes,), 99, dtype=torch.uint8)
    StagedInputs(layout, buffer).pack(inputs)
    return layout.views(buffer)


@pytest.fixture
def backend(llm: LLM) -> ProgramBackend:
    return loaded_backend(llm)


def test_padded_steps_equal_unpadded_ones(llm: LLM, backend: ProgramBackend) -> None:
    logits: list[list[Tensor]] = []
    states: list[dict[str, Tensor]] = []
    for is_padded in (False, True):
        for state in backend.states.values():
            state.fill_(1)  # what an earlier owner of a slot left
        logits.append([])
        for inputs in STEPS:
            shape = captured_shape(inputs, llm.manifest.limits)
            assert shape is not None
            given = padded(backend, inputs, shape) if is_padded else inputs
            logits[-1].append(backend.run(given)[: len(inputs["logits_indices"])])
        states.append({name: state.clone() for name, state in backend.states.items()})
    for plain, other in zip(*logits, strict=True):
        torch.testing.assert_close(plain, other)
    for name, state in states[0].items():
        torch.testing.assert_close(state, states[1][name], msg=name)
