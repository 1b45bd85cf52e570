"""The lowered ONNX of tiny models, written, read back and executed, against the program itself."""

from __future__ import annotations

from functools import cache
from typing import Any

import onnx
import pytest
import torch
from model_zoo import tiny_config_dict
from onnx import helper

from qwen4exp_trt.builder.interpret import OnnxProgram
from qwen4exp_trt.builder.lower import lower_program
from qwen4exp_trt.errors import BuildError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.export import export_program
from qwen4exp_trt.passes.base import PassManager
from qwen4exp_trt.passes.pipeline import Quantization, make_pipeline
from qwen4exp_trt.passes.verification import batch_samples, initial_states, random_source, relative_error
from qwen4exp_trt.runtime.materialize import materialize_weight
from qwen4exp_trt.runtime.program import Program

BLOCK_SIZE = 16
LINEAR, FULL = "linear_attention", "full_attention"
NO_INDEXER = dict.fromkeys(
    ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
)
CONFIGS: dict[str, dict[str, Any]] = {
    "all mechanisms": {},
    "no n-gram embedding": {"ple_layer_ids": [], "num_hidden_layers": 2, "layer_types": [LINEAR, FULL]},
    "no indexer": NO_INDEXER | {"num_hidden_layers": 2, "layer_types": [FULL, LINEAR]},
    "FP8 cache": {"num_hidden_layers": 1, "layer_types": [FULL], "ple_layer_ids": []},
    "two streams": {"hc_count": 2, "num_hidden_layers": 3, "layer_types": [FULL, LINEAR, FULL]},
}


@cache
def traced(name: str, dtype: str) -> tuple[ModelConfig, Program]:
    config = ModelConfig.from_dict(tiny_config_dict(**CONFIGS[name]), name)
    return config, export_program(config, dtype, BLOCK_SIZE, "float8_e4m3fn" if name == "FP8 cache" else "auto")


@pytest.mark.parametrize("transformed", [False, True], ids=["as traced", "after the passes"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_onnx_equals_program(name: str, dtype: str, transformed: bool) -> None:
    """Bitwise, in both dtypes: the model spells the program's own ops, with the same roundings.

    The samples prefill one and several sequences, then mix prefill with decode, then decode.
    """
    config, program = traced(name, dtype)
    weight_source = random_source(program.weights)
    if transformed:
        program, _ = PassManager(make_pipeline(Quantization())).run(program)
    model = onnx.load_from_string(lower_program(program).SerializeToString())
    onnx.checker.check_model(model, full_check=True)
    interpreter = OnnxProgram(model)
    weights = {spec.name: materialize_weight(spec, weight_source) for spec in program.weights}
    for sample in batch_samples(config.vocab_size, BLOCK_SIZE, config.indexer_budget or 1):
        expected, got = initial_states(program, sample), initial_states(program, sample)
        for inputs in sample.steps:
            outputs = program.run(inputs, expected, weights)
            results = interpreter.run({**inputs, **weights, **got})
            assert results.keys() == {*outputs, *(spec.out_name for spec in program.states)}
            for key, value in outputs.items():
                assert torch.isfinite(value).all()
                assert torch.equal(results[key], value), key
            for spec in program.states:
                assert results[spec.out_name] is got[spec.name], "an aliased output is the state itself"
                assert relative_error(expected[spec.name], got[spec.name]) == 0, spec.name


def relu_model(domain: str) -> onnx.ModelProto:
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["T"]) for name in ("x", "y")]
    node = helper.make_node("Relu", ["x"], ["y"], name="layers.0.relu", domain=domain)
    return helper.make_model(helper.make_graph([node], "g", values[:1], values[1:]))


@pytest.mark.parametrize("domain,op", [("", "ai.onnx::Relu"), ("q4e", "q4e::Relu")])
def test_an_unknown_op_is_named(domain: str, op: str) -> None:
    with pytest.raises(BuildError, match=f"node layers.0.relu: the interpreter does not know the op {op}"):
        OnnxProgram(relu_model(domain)).run({"x": torch.ones(3)})


def test_a_missing_input_is_named() -> None:
    with pytest.raises(BuildError, match="also needs the inputs x"):
        OnnxProgram(relu_model("")).run({})
