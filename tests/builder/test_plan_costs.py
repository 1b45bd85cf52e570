"""The plan, which is made from a config alone, against what the ops of the program that is built say they move."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
from plan_requests import plan_request
from released_model import (
    CONVERTED_TO_NVFP4,
    DRAFT_EXPERTS,
    NVFP4_TABLE,
    OFFICIAL_FP8,
    released_config,
    released_formats,
)

from qwen4exp_trt.builder.activations import one_layer_of_each_kind
from qwen4exp_trt.builder.calibrate import linears_of_layers
from qwen4exp_trt.builder.compile import ExportOptions, transform_config
from qwen4exp_trt.builder.convert import num_table_scales
from qwen4exp_trt.builder.plan import make_plan
from qwen4exp_trt.builder.policy import is_table
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.weights import expected_weights
from qwen4exp_trt.passes.choose_formats import Formats
from qwen4exp_trt.passes.pipeline import Quantization
from qwen4exp_trt.plugins.cost import Cost, StepSize
from qwen4exp_trt.plugins.registry import spec_of
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.specs import DTYPE_BYTES, Literal
from qwen4exp_trt.runtime.step_costs import step_cost, step_costs
from qwen4exp_trt.runtime.target_devices import DEVICES
from qwen4exp_trt.runtime.weight_formats import WeightFormat

CONTEXT = 32_768
DECODE = StepSize(num_seqs=1, num_tokens=1, context_len=CONTEXT - 1)
NVFP4 = CONVERTED_TO_NVFP4 | NVFP4_TABLE
FORMATS = {
    "bf16": {},
    "official fp8": OFFICIAL_FP8,
    "nvfp4": NVFP4,
    "nvfp4 draft head": NVFP4 | released_formats({DRAFT_EXPERTS: WeightFormat.NVFP4}),
}


def slow(name: str) -> object:
    return pytest.param(name, marks=pytest.mark.slow)


@cache
def small_config() -> ModelConfig:
    """The released widths, with one layer of each kind."""
    return one_layer_of_each_kind(released_config(has_draft_head=True))


_programs: dict[object, Program] = {}


def program_of(config: ModelConfig, formats: Formats, is_draft: bool, kv_cache_dtype: str, is_w4a4: bool) -> Program:
    key = (config, id(formats), is_draft, kv_cache_dtype, is_w4a4)
    if key not in _programs:
        _programs[key] = make_program(config, formats, is_draft, kv_cache_dtype, is_w4a4)
    return _programs[key]


def make_program(config: ModelConfig, formats: Formats, is_draft: bool, kv_cache_dtype: str, is_w4a4: bool) -> Program:
    shapes = expected_weights(config)
    known = {name: weight_format for name, weight_format in formats.items() if name in shapes}
    scales = {name: num_table_scales(shapes[name][0]) for name in shapes if is_table(name)}
    options = ExportOptions("bfloat16", kv_cache_dtype, 64, is_draft=is_draft)
    program, _ = transform_config(config, options, Quantization(known, scales))
    if is_w4a4:
        input_scales = dict.fromkeys(linears_of_layers(program), 0.01)
        program, _ = transform_config(config, options, Quantization(known, scales, input_scales))
    return program


def constant_bytes(program: Program) -> int:
    """What the ops read of constants, which no checkpoint has and no plan counts, and of the scales of table rows."""
    constants = {spec.name: spec for spec in program.weights if isinstance(spec.recipe, Literal)}
    total = 0
    for node in program.calls():
        names = [operand.name.replace("__", ".") for operand in node.all_input_nodes]
        total += sum(constants[name].tensor.num_bytes({}) for name in names if name in constants)
        spec = spec_of(node.target)
        if spec is not None and spec.name in ("fp8_ple_gather", "nvfp4_ple_gather"):
            total += DTYPE_BYTES["float32"] * 16  # one a row
    return total


def check(
    config: ModelConfig,
    formats: Formats,
    is_draft: bool,
    kv_cache_dtype: str = "auto",
    is_w4a4: bool = False,
    context: int = CONTEXT,
) -> None:
    program = program_of(config, formats, is_draft, kv_cache_dtype, is_w4a4)
    plan = make_plan(replace(plan_request(formats, 1, context, kv_cache_dtype), config=config))
    cost = step_cost(program, StepSize(num_seqs=1, num_tokens=1, context_len=context - 1))
    states = plan.draft_states if is_draft else plan.states
    assert cost.state_bytes == sum(use.token_bytes for use in states.values())
    planned = plan.draft_token_bytes if is_draft else plan.token_bytes
    assert cost.memory_bytes == planned + constant_bytes(program)


@pytest.mark.parametrize("name", [slow("bf16"), slow("official fp8"), "nvfp4"])
def test_ops_move_what_the_plan_says(name: str) -> None:
    for context in (CONTEXT, 2048):  # which is too short for scores
        check(small_config(), FORMATS[name], is_draft=False, context=context)


@pytest.mark.parametrize("name", [slow("bf16"), "nvfp4 draft head"])
def test_the_draft_head_moves_what_the_plan_says(name: str) -> None:
    check(small_config(), FORMATS[name], is_draft=True)


def test_quantized_activations_and_caches() -> None:
    check(small_config(), NVFP4, is_draft=False, kv_cache_dtype="float8_e4m3fn", is_w4a4=True)


@pytest.mark.slow
@pytest.mark.time_limit(600)
@pytest.mark.parametrize("is_w4a4", [False, True], ids=["w4a16", "w4a4"])
def test_a_token_of_the_released_model(is_w4a4: bool) -> None:
    """Of all 48 layers. 5.16 GB at 32,768 tokens with NVFP4 weights: 45 tokens a second of a GB10."""
    config = released_config()
    check(config, NVFP4, is_draft=False, is_w4a4=is_w4a4)
    cost = step_cost(program_of(config, NVFP4, False, "auto", is_w4a4), DECODE)
    assert cost.memory_bytes == pytest.approx(5.16e9, rel=2e-3)
    assert DEVICES["sm121"].bytes_per_second / cost.memory_bytes == pytest.approx(45.1, abs=0.05)


def test_a_prompt_multiplies_every_matrix() -> None:
    """Twice its elements for each row that meets it; the rest is of attention and the recurrence."""
    config = small_config()
    program = program_of(config, NVFP4, False, "auto", False)
    tokens, layers = 4096, config.num_hidden_layers
    costs = step_costs(program, StepSize(1, tokens, 0))
    products: dict[str, int] = {}
    for each in costs:
        products[each.op] = products.get(each.op, 0) + each.cost.flops
    hidden, vocab = config.hidden_size, config.vocab_size
    experts = config.num_experts_per_tok * config.moe_intermediate_size + config.shared_expert_intermediate_size
    assert products["q4e.nvfp4_moe"] == layers * 2 * tokens * hidden * (config.num_experts + 3 * experts + 1)
    rule = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    assert products["q4e.gated_delta_rule"] == 2 * tokens * 6 * rule
    most = 2048 + 3
    attended = most * (most + 1) // 2 + (tokens - most) * most
    assert products["q4e.qsa_attention"] == 4 * attended * config.num_attention_heads * config.head_dim
    scored = sum(count // 4 for count in range(2048 + 4, tokens + 1))  # of 513 groups and more
    assert products["q4e.qsa_select"] == 2 * scored * config.indexer_n_heads * config.indexer_head_dim
    head = next(each.cost for each in costs if each.path.startswith("lm_head"))
    assert head.flops == 2 * 1 * hidden * vocab


def test_a_batch_reads_weights_once_and_states_each() -> None:
    program = program_of(small_config(), NVFP4, False, "auto", False)
    one, eight = step_cost(program, DECODE), step_cost(program, StepSize(8, 8, CONTEXT - 1))
    assert eight.state_bytes == 8 * one.state_bytes
    measured = step_cost(program, StepSize(8, 8, CONTEXT - 1, distinct_experts=10))
    rows = eight.weight_bytes - measured.weight_bytes  # the other experts
    assert one.weight_bytes < measured.weight_bytes < one.weight_bytes + 100_000  # rows of the tables
    assert rows > 60 * 3 * 640 * 2560 // 2 * small_config().num_hidden_layers
    assert Cost() + one == one
