from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from model_zoo import tiny_config_dict
from released_model import ReleasedExport
from torch._subclasses import FakeTensorMode

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.export import export_program, input_specs
from qwen4exp_trt.frontend.model import TextModel
from qwen4exp_trt.frontend.ngram import ngram_hash
from qwen4exp_trt.frontend.states import state_specs
from qwen4exp_trt.frontend.weights import expected_weights
from qwen4exp_trt.passes.legality import check_legality
from qwen4exp_trt.passes.verification import batch_samples, initial_states, random_source, run_sample
from qwen4exp_trt.plugins.registry import all_specs, spec_of
from qwen4exp_trt.runtime.materialize import materialize_weight
from qwen4exp_trt.runtime.program import Program, identifier_from_path, is_getitem, path_from_identifier
from qwen4exp_trt.runtime.program_text import ATEN_OPS, format_program, op_name
from qwen4exp_trt.runtime.specs import Literal, Source
from qwen4exp_trt.runtime.weights import sources_of, transform

BLOCK_SIZE = 16
TINY = ModelConfig.from_dict(tiny_config_dict(), "tiny")


@cache
def tiny_program(dtype: str) -> Program:
    return export_program(TINY, dtype, BLOCK_SIZE)


@pytest.fixture(params=["float32", "bfloat16"])
def tiny(request: pytest.FixtureRequest) -> Program:
    return tiny_program(request.param)


@pytest.fixture(params=["tiny", "released"])
def exported(request: pytest.FixtureRequest) -> tuple[ModelConfig, Program]:
    if request.param == "tiny":
        return TINY, tiny_program("bfloat16")
    released: ReleasedExport = request.getfixturevalue("released_export")
    return released.config, released.program


def test_the_released_model_exports_in_bounded_time_and_memory(released_export: ReleasedExport) -> None:
    """Its weights are 252 GB; what the export needs is the graph."""
    assert released_export.seconds < 60
    assert released_export.peak_growth_bytes < 1 << 30


def test_the_program_is_legal(exported: tuple[ModelConfig, Program]) -> None:
    """Every op is in the list, has a shape, and each state has one writer that comes first."""
    check_legality(exported[1], "the exported program")
    assert {op_name(node.target) for node in exported[1].calls() if not is_getitem(node)} <= ATEN_OPS | {
        op_name(spec.overload) for spec in all_specs().values()
    }


def test_every_listed_aten_op_is_used() -> None:
    """The list is what the lowering must know; an op that no program holds would be untested there."""
    calls = tiny_program("bfloat16").calls()
    assert {op_name(node.target) for node in calls if not is_getitem(node) and not spec_of(node.target)} == ATEN_OPS


def test_nodes_are_named_after_the_modules_that_compute_them(exported: tuple[ModelConfig, Program]) -> None:
    config, program = exported
    with FakeTensorMode():
        modules = dict(TextModel(config, state_specs(config, "bfloat16", 64)).named_modules())
    for node in program.calls():
        path = path_from_identifier(node.name)
        assert identifier_from_path(path) == node.name
        module, _, op = (path.removesuffix(".out") if is_getitem(node) else path).rpartition(".")
        assert module in modules, path
        producer: Any = node.args[0] if is_getitem(node) else node
        assert re.fullmatch(rf"{op_name(producer.target).split('.')[1]}(_\d+)?", op), path


def test_every_dim_of_the_text_is_a_number_or_named(exported: tuple[ModelConfig, Program]) -> None:
    shapes = re.findall(r"(?:float32|bfloat16|int32|int64)\[(.*?)\]", format_program(exported[1]))
    dims = {dim.strip() for shape in shapes for dim in shape.split(",")}
    assert {dim for dim in dims if not dim.isdigit()} == {"T", "L"}
    named = {dim for spec in (*input_specs(), *exported[1].states) for dim in spec.shape if isinstance(dim, str)}
    assert set(exported[1].dim_names().values()) == named


def test_inputs_states_and_outputs_are_those_of_the_tables(exported: tuple[ModelConfig, Program]) -> None:
    config, program = exported
    assert program.inputs == input_specs()
    assert program.states == state_specs(config, "bfloat16", 64 if config is not TINY else BLOCK_SIZE)
    ((name, shape, dtype),) = [(spec.name, spec.shape, spec.dtype) for spec in program.outputs]
    assert (name, shape, dtype) == ("logits", ("L", config.vocab_size), "bfloat16")
    placeholders = program.placeholders()
    for spec in (*program.inputs, *program.states, *(weight.tensor for weight in program.weights)):
        value = placeholders[spec.name].meta["val"]
        assert value.dim() == len(spec.shape)
        assert str(value.dtype) == f"torch.{spec.dtype}"


def test_weights_read_the_canonical_tensors_and_constants_are_in_the_program(
    exported: tuple[ModelConfig, Program],
) -> None:
    config, program = exported
    recipes = {spec.name: spec.recipe for spec in program.weights}
    shapes = {spec.name: spec.tensor.shape for spec in program.weights}
    literals = {name for name, recipe in recipes.items() if isinstance(recipe, Literal)}
    canonical = expected_weights(config)
    assert {name: shapes[name] for name in recipes.keys() - literals} == canonical
    assert all(recipes[name] == transform("cast", Source(name), dtype="bfloat16") for name in canonical)
    embedding = "layers.1.ple.ple_embedding"
    constants = {"layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"}
    assert literals == {"inv_freq", "no_selection"} | {f"{embedding}.{name}" for name in constants}
    multipliers = recipes[f"{embedding}.layer_multipliers"]
    assert isinstance(multipliers, Literal)
    assert (multipliers.dtype, multipliers.values) == ("int64", ngram_hash(config, 1).multipliers)


def test_the_program_computes_what_the_model_does(tiny: Program) -> None:
    """The same steps through the module itself, run eagerly on the weights of the program."""
    dtype = tiny.outputs[0].dtype
    source = random_source(tiny.weights)
    weights = {spec.name: materialize_weight(spec, source) for spec in tiny.weights}
    model = TextModel(TINY, state_specs(TINY, dtype, BLOCK_SIZE))
    model.load_state_dict(weights, assign=True)
    for sample in batch_samples(TINY.vocab_size, BLOCK_SIZE, 16):
        expected = run_sample(tiny, sample, weights)
        model_states = initial_states(tiny, sample)
        with torch.inference_mode():
            logits = [model(*step.values(), list(model_states.values())) for step in sample.steps]
        for index, value in enumerate(logits):
            assert torch.equal(value, expected[f"logits of step {index}"])
        for name, value in model_states.items():
            assert torch.equal(value, expected[name]), name


def test_recipes_can_be_pointed_at_a_checkpoint(tiny: Program) -> None:
    moved = tiny.map_weight_sources(lambda name: Source(f"model.{name}"))
    names = [name for spec in moved.weights for name in sources_of(spec.recipe)]
    assert names == [f"model.{name}" for spec in tiny.weights for name in sources_of(spec.recipe)]
    assert format_program(moved) == format_program(tiny)


def test_the_default_dtype_is_restored(tiny: Program) -> None:
    assert torch.get_default_dtype() == torch.float32
