"""A tiny model's engine on the simulator: its backend, and steps for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from cpu_stream import CpuStream
from draft_head_steps import Rows, step_inputs
from torch import Tensor

from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.manifest import Manifest
from qwen4exp_trt.runtime.state_pool import allocate_states
from qwen4exp_trt.runtime.tensorrt.backend import TensorRTBackend

CPU = torch.device("cpu")
PAGES = 8
"""Of each sequence, in steps made by `prompt` and `decode`."""


def engine_backend(trt: Any, bundle: Path, loaded: EagerBackend, num_blocks: int = 24, **how: Any) -> TensorRTBackend:
    """The model's engine over the weights of ``loaded`` and states of its own."""
    manifest = Manifest.load(bundle)
    states = allocate_states(loaded.program.states, num_blocks, manifest.limits.num_slots, CPU)
    how.setdefault("stream", CpuStream())
    return TensorRTBackend(trt, bundle, manifest, loaded.program, states, loaded.weights, CPU, **how)


def prompt(length: int) -> dict[str, Tensor]:
    """The inputs of a step of a prompt that gives one row of logits."""
    return step_inputs(Rows(0, 0, list(range(3, 3 + length))), pages=PAGES, num_logits=1)


def decode(position: int, num_seqs: int = 1) -> dict[str, Tensor]:
    """The inputs of a step of one token for each sequence."""
    return step_inputs(*(Rows(slot, position, [7 + slot]) for slot in range(num_seqs)), pages=PAGES)
