"""A whole tiny model by its CUDA kernels, executed by the emulator, beside the ops' CPU bodies."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_emulator import run_emulated
from model_zoo import tiny_config_dict
from packed_steps import PAGES, STEPS
from quantized_parts import quantized_source
from torch import fx

from qwen4exp_trt.builder.compile import ExportOptions, transform_config
from qwen4exp_trt.builder.weight_plan import plan_weights
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.export import export_program
from qwen4exp_trt.passes.pipeline import Quantization
from qwen4exp_trt.plugins.registry import spec_of
from qwen4exp_trt.runtime.materialize import load_weights
from qwen4exp_trt.runtime.own_linears import with_own_linears
from qwen4exp_trt.runtime.state_pool import allocate_states

pytestmark = pytest.mark.slow
BLOCK_SIZE = 8
LAYERS = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "ple_layer_ids": [1]}


class Emulated(fx.Interpreter):
    """Runs a graph with the kernels of our ops."""

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        spec = spec_of(target)
        if spec is None:
            return super().call_function(target, args, kwargs)
        outputs = run_emulated(spec, list(args))
        return outputs[0] if len(outputs) == 1 else outputs


@pytest.mark.parametrize(
    ("dtype", "precision", "tolerance"),
    [("float32", "bf16", 2e-6), ("bfloat16", "bf16", 1e-2), ("bfloat16", "nvfp4", 1e-2)],
)
def test_kernels_decode_as_the_cpu_does(dtype: str, precision: str, tolerance: float) -> None:
    """Prompts, single tokens, drafts and a sequence that joins; slots and pages hold NaN before."""
    config = ModelConfig.from_dict(tiny_config_dict(**LAYERS), "tiny")
    plan = plan_weights(config, None, precision, "checkpoint", ())
    options = ExportOptions(dtype, "auto", BLOCK_SIZE)
    program, _ = transform_config(config, options, Quantization(plan.formats, plan.table_scales))
    source = quantized_source(export_program(config, dtype, BLOCK_SIZE).weights, plan.formats)
    weights = load_weights(program.weights, source)
    states = [allocate_states(program.states, num_blocks=3 * PAGES, num_slots=3) for _ in range(2)]
    for state in (*states[0].values(), *states[1].values()):
        state.view(torch.uint8).fill_(255)
    own = with_own_linears(program)
    for inputs in STEPS:
        expected = program.run(inputs, states[0], weights)["logits"].float()
        found = own.run(inputs, states[1], weights, Emulated(own.module).run)["logits"].float()
        assert (found - expected).norm() <= tolerance * expected.norm()
