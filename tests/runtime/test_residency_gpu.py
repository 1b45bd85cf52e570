"""A program with its n-gram table on the GPU, in the host's memory and in files: the same logits, bit by bit."""

from __future__ import annotations

import re

import pytest
import torch
from model_zoo import tiny_config_dict
from quantized_parts import quantized_source
from torch import Tensor

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.export import export_program
from qwen4exp_trt.frontend.weights import expected_weights
from qwen4exp_trt.passes.base import PassManager
from qwen4exp_trt.passes.patterns import ngram_table_weights
from qwen4exp_trt.passes.pipeline import Quantization, make_pipeline
from qwen4exp_trt.passes.verification import batch_samples, initial_states
from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.materialize import load_weights
from qwen4exp_trt.runtime.ngram_rows import NgramRows
from qwen4exp_trt.runtime.specs import NUM_SLOTS, PleResidency
from qwen4exp_trt.runtime.tensor_source import FunctionSource
from qwen4exp_trt.runtime.weight_formats import WeightFormat

pytestmark = pytest.mark.gpu
LIMITS = EngineLimits(max_batch_size=4, max_seq_len=256, prefill_chunk=256, block_size=16)


@pytest.mark.parametrize("table", [WeightFormat.FLOAT, WeightFormat.FP8, WeightFormat.NVFP4])
def test_residencies_agree(table: WeightFormat) -> None:
    """A step with prompts, and captured ones with drafts."""
    config = ModelConfig.from_dict(tiny_config_dict(), "residency")
    traced = export_program(config, "bfloat16", LIMITS.block_size)
    tables = [name for name in expected_weights(config) if re.search(r"\.ngram_embedding\.", name)]
    formats = {} if table is WeightFormat.FLOAT else dict.fromkeys(tables, table)
    source = FunctionSource(quantized_source(traced.weights, formats))
    (_, sample) = batch_samples(config.vocab_size, LIMITS.block_size, config.indexer_budget or 1)
    device, results = torch.device("cuda", 0), list[list[Tensor]]()
    for residency in PleResidency:
        program, _ = PassManager(make_pipeline(Quantization(formats), residency)).run(traced)
        on_host = ngram_table_weights(program) if residency is PleResidency.HOST else []
        weights = load_weights(program.weights, source, device, host_weights=on_host)
        assert all(weights[name].is_cpu and weights[name].is_pinned() for name in on_host)
        states = {name: state.to(device) for name, state in initial_states(program, sample).items()}
        rows = NgramRows(program.inputs, source, sample.extents[NUM_SLOTS])
        backend = EagerBackend(program, states, weights, LIMITS, device, rows)
        results.append([backend.run(inputs).cpu() for inputs in sample.steps])
    for other in results[1:]:
        assert all(torch.equal(expected, got) for expected, got in zip(results[0], other, strict=True))
