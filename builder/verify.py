"""``--verify``: executes a build's programs on the CPU with the checkpoint's own weights."""

from __future__ import annotations

import math
from dataclasses import replace

import onnx
import torch

from qwen4exp_trt.builder.interpret import OnnxProgram
from qwen4exp_trt.builder.memory import check_memory
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.weights import expected_weights
from qwen4exp_trt.passes.verification import SampleSteps, Verifier, batch_samples, initial_states, relative_error
from qwen4exp_trt.runtime.materialize import materialize_weight
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.specs import STACK
from qwen4exp_trt.runtime.tensor_source import TensorFunction

ONNX_TOLERANCE = 1e-5
"""Relative RMS bound in either precision: every ONNX op rounds where the program's op does."""

_COPIES = 3
"""Float32 copies of the weights that live at once: before a pass, after it, and the one being made."""


def check_verify_memory(config: ModelConfig) -> None:
    """`BuildError` when the float32 weights that verification holds do not fit in memory."""
    needed = _COPIES * 4 * sum(math.prod(shape) for shape in expected_weights(config).values())
    check_memory(needed, "--verify", "build without it, or verify a smaller model")


def make_verifier(config: ModelConfig, block_size: int, source: TensorFunction, is_draft: bool = False) -> Verifier:
    """A verifier of the model's programs, or the draft head's, whose recipes name what ``source`` gives."""
    samples = batch_samples(config.vocab_size, block_size, config.indexer_budget or 1)
    if is_draft:
        generator = torch.Generator().manual_seed(0)
        samples = [_with_stacks(sample, config.stack_width, generator) for sample in samples]
    return Verifier(samples, source)


def _with_stacks(sample: SampleSteps, width: int, generator: torch.Generator) -> SampleSteps:
    """``sample`` with random stacks for every row."""
    steps = [{**step, STACK: torch.randn(len(step["input_ids"]), width, generator=generator)} for step in sample.steps]
    return replace(sample, steps=tuple(steps))


def verify_onnx(program: Program, model: onnx.ModelProto, verifier: Verifier) -> float:
    """Execute the ONNX and the program on the verifier's samples; the largest relative error of any output or state.

    `BuildError` above `ONNX_TOLERANCE`; integers must be equal.
    """
    weights = {spec.name: materialize_weight(spec, verifier.source) for spec in program.weights}
    interpreter, worst = OnnxProgram(model), 0.0
    for sample in verifier.samples_for(program):
        expected, got = initial_states(program, sample), initial_states(program, sample)
        for inputs in sample.steps:
            outputs = program.run(inputs, expected, weights)
            results = interpreter.run({**inputs, **weights, **got})
            got = {spec.name: results[spec.out_name] for spec in program.states}
            for name, value in {**outputs, **expected}.items():
                error = relative_error(value, results[name] if name in outputs else got[name])
                if not error <= ONNX_TOLERANCE:
                    raise BuildError(
                        f"the ONNX gives another {name} than the program: relative error {error:.3g}, "
                        f"tolerance {ONNX_TOLERANCE:g}"
                    )
                worst = max(worst, error)
    return worst
