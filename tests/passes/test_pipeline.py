"""The whole pipeline on tiny models with execution, on the released size without, and what its order promises."""

from __future__ import annotations

import math
import pkgutil
import re
import time
from collections import Counter
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from model_zoo import tiny_config_dict
from quantized_parts import quantized_source
from released_model import ReleasedExport
from torch import Tensor, fx

from qwen4exp_trt import passes
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.export import export_program
from qwen4exp_trt.frontend.weights import expected_weights
from qwen4exp_trt.passes.base import PassManager
from qwen4exp_trt.passes.facts import find_violation
from qwen4exp_trt.passes.pipeline import Quantization, make_pipeline
from qwen4exp_trt.passes.verification import Verifier, batch_samples, initial_states, random_source, relative_error
from qwen4exp_trt.runtime.materialize import materialize_weight
from qwen4exp_trt.runtime.program import Program, is_getitem
from qwen4exp_trt.runtime.program_text import op_name
from qwen4exp_trt.runtime.specs import PleResidency, extent_of
from qwen4exp_trt.runtime.weight_formats import WeightFormat

BLOCK_SIZE = 16
NO_INDEXER: dict[str, Any] = dict.fromkeys(
    ("indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio")
)
LINEAR, FULL = "linear_attention", "full_attention"
CONFIGS: dict[str, dict[str, Any]] = {
    "all mechanisms": {},
    "two streams": {"hc_count": 2},
    "no n-gram embedding": {"ple_layer_ids": []},
    "no indexer": NO_INDEXER,
    "two n-gram embeddings": {"ple_layer_ids": [1, 3]},
    "other layers": {"layer_types": [FULL, LINEAR, FULL, FULL], "output_gate_type": "silu", "norm_topk_prob": False},
    "one layer": {"num_hidden_layers": 1, "layer_types": [FULL], "ple_layer_ids": []},
}


@cache
def tiny_config(name: str) -> ModelConfig:
    return ModelConfig.from_dict(tiny_config_dict(**CONFIGS[name]), name)


@cache
def tiny_program(name: str) -> Program:
    return export_program(tiny_config(name), "float32", BLOCK_SIZE)


def verifier_for(config: ModelConfig, program: Program) -> Verifier:
    samples = batch_samples(config.vocab_size, BLOCK_SIZE, config.indexer_budget or 1)
    return Verifier(samples, random_source(program.weights))


def ops_of(program: Program) -> Counter[str]:
    return Counter(op_name(node.target).removesuffix(".default") for node in program.calls() if not is_getitem(node))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("two streams", "two n-gram embeddings") else [])
        for name in CONFIGS
    ],
)
def test_every_pass_keeps_the_function_of_a_tiny_model(name: str) -> None:
    """Executed before and after each pass: outputs of every step and all states, exactly or within its tolerance."""
    config, program = tiny_config(name), tiny_program(name)
    after, results = PassManager(make_pipeline(Quantization()), verifier_for(config, program)).run(program)
    assert [result.name for result in results] == [graph_pass.name for graph_pass in make_pipeline(Quantization())]
    # The reads of half layers, each behind a combine but the first, and those that the n-gram embedding's sum precedes.
    alone = len({0, *config.ple_layers})
    ops = ops_of(after)
    assert ops["q4e.hc_read"] == 2 * config.num_hidden_layers - alone
    assert ops["q4e.hc_norm"] == ops["q4e.hc_project"] == alone
    assert (ops["q4e.hc_combine_norm"], ops["q4e.hc_gate_mix"]) == (1, alone + 1)  # the final mixer's, and theirs


QUANTIZED = (r"\.(in_proj_qkv|in_proj_z|out_proj)\.", r"\.self_attn\.[qkvo]_proj\.", r"\.ple\..*_proj\.", r"^lm_head\.")
EXPERTS, SHARED_EXPERT, TABLE = r"\.experts\.", r"\.shared_expert\.", r"\.ngram_embedding\."


def formats_by(patterns: dict[str, WeightFormat]) -> dict[str, WeightFormat]:
    names = expected_weights(tiny_config("all mechanisms"))
    return {name: form for pattern, form in patterns.items() for name in names if re.search(pattern, name)}


ALL_NVFP4 = dict.fromkeys((*QUANTIZED, EXPERTS, SHARED_EXPERT, TABLE), WeightFormat.NVFP4)
ALL_FP8 = dict.fromkeys(QUANTIZED, WeightFormat.FP8) | {EXPERTS: WeightFormat.FP8_BLOCKS, TABLE: WeightFormat.FP8}
MIXED = {
    r"\.in_proj_qkv\.": WeightFormat.FP8_BLOCKS,
    r"\.in_proj_z\.": WeightFormat.NVFP4,
    EXPERTS: WeightFormat.NVFP4,
    r"\.q_proj\.": WeightFormat.NVFP4,
    r"\.k_proj\.": WeightFormat.FP8,
    TABLE: WeightFormat.NVFP4,
}


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("two n-gram embeddings", WeightFormat.FLOAT),
        ("all mechanisms", WeightFormat.FP8),
        ("all mechanisms", WeightFormat.NVFP4),
    ],
)
def test_a_table_that_is_looked_up_is_no_weight(name: str, table: WeightFormat) -> None:
    """Bitwise the same outputs; what the hash and the gather read is not in the program."""
    config, program = tiny_config(name), tiny_program(name)
    tables = [name for name in expected_weights(config) if re.search(TABLE, name)]
    formats = {} if table is WeightFormat.FLOAT else dict.fromkeys(tables, table)
    scales = dict.fromkeys(tables, 2)
    source = quantized_source(program.weights, formats, scales)
    verifier = Verifier(verifier_for(config, program).samples, source)
    *others, look_up, drop_dead_code = make_pipeline(Quantization(formats, scales), PleResidency.DISK)
    before, _ = PassManager(others).run(program)
    after, (result, _) = PassManager([look_up, drop_dead_code], verifier).run(before)
    assert (result.name, result.rewrites, result.max_error) == ("look_up_ngram_rows", len(config.ple_layers), 0)
    assert not [op for op in ops_of(after) if "hash" in op or "gather" in op]
    assert [spec.name for spec in after.inputs if "." in spec.name] == [
        f"layers.{layer}.ple.ngram_embeddings" for layer in config.ple_layers
    ]
    kept = [spec.name for spec in (*after.weights, *after.states) if ".ple." in spec.name]
    assert not [name for name in kept if "ple_embedding" in name or "ngram_ids" in name]


@pytest.mark.parametrize(
    ("patterns", "ops"),
    [
        pytest.param(
            ALL_NVFP4,
            # qkvz and out of three layers, qkv and o of one, key and value of the n-gram embedding, the head.
            {"q4e.nvfp4_linear": 6 + 2 + 2 + 1, "q4e.nvfp4_moe": 4, "q4e.nvfp4_ple_gather": 1},
            id="nvfp4",
        ),
        # q, k and v stay apart, since their rows share blocks; so do qkv and z.
        pytest.param(
            ALL_FP8, {"q4e.fp8_linear": 9 + 4 + 2 + 1, "q4e.fp8_routed_moe": 4, "q4e.fp8_ple_gather": 1}, id="fp8"
        ),
        pytest.param(
            MIXED,
            {"q4e.fp8_linear": 3 + 1, "q4e.nvfp4_linear": 3 + 1, "q4e.nvfp4_routed_moe": 4, "q4e.nvfp4_ple_gather": 1},
            id="mixed",
        ),
    ],
)
def test_every_pass_keeps_the_function_of_a_quantized_model(
    patterns: dict[str, WeightFormat], ops: dict[str, int]
) -> None:
    """The program before has the weights that the parts mean."""
    config, program, formats = tiny_config("all mechanisms"), tiny_program("all mechanisms"), formats_by(patterns)
    samples = verifier_for(config, program).samples
    verifier = Verifier(samples, quantized_source(program.weights, formats))
    after, _ = PassManager(make_pipeline(Quantization(formats)), verifier).run(program)
    assert {op: count for op, count in ops_of(after).items() if op.startswith(("q4e.nvfp4", "q4e.fp8"))} == ops


def test_everything_that_a_pass_ensures_holds_at_the_end() -> None:
    """A later pass must not undo an earlier one: a merge after folding, say, would leave a concatenation of weights."""
    after, _ = PassManager(make_pipeline(Quantization())).run(tiny_program("all mechanisms"))
    facts = {fact for graph_pass in make_pipeline(Quantization()) for fact in graph_pass.ensures}
    assert {fact: find_violation(fact, after) for fact in facts} == dict.fromkeys(facts)


def test_a_second_run_of_the_pipeline_changes_nothing() -> None:
    once, _ = PassManager(make_pipeline(Quantization())).run(tiny_program("all mechanisms"))
    _, results = PassManager(make_pipeline(Quantization())).run(once)
    assert [result.rewrites for result in results] == [0] * len(make_pipeline(Quantization()))


@pytest.mark.parametrize("residency", PleResidency)
def test_every_requirement_is_ensured_by_an_earlier_pass(residency: PleResidency) -> None:
    known: set[str] = set()
    for graph_pass in make_pipeline(Quantization(), residency):
        assert graph_pass.requires <= known, f"{graph_pass.name} requires {graph_pass.requires - known}"
        known |= graph_pass.ensures


def test_every_pass_file_is_in_the_pipeline_and_has_a_test() -> None:
    files = [module.name for module in pkgutil.iter_modules(passes.__path__)]
    found = {name for name in files if hasattr(import_module(f"{passes.__name__}.{name}"), name)}
    assert found == {graph_pass.name for graph_pass in make_pipeline(Quantization(), PleResidency.DISK)}
    tests = Path(__file__).parent
    assert [name for name in found if not (tests / f"test_{name}.py").is_file()] == []


class ShapeChecker(fx.Interpreter):
    """Executes a program and compares each value with the shape and dtype that the graph states for it."""

    def __init__(self, program: Program) -> None:
        super().__init__(program.module)
        self.dims, self.extents = program.dim_names(), {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        values = result if isinstance(result, tuple) else (result,)
        stated: Any = n.meta.get("val")
        for value, fake in zip(values, stated if isinstance(stated, tuple | list) else (stated,), strict=True):
            if n.op != "output":
                self.check(n.name, value, fake)
        return result

    def check(self, name: str, value: Tensor, fake: Tensor) -> None:
        assert value.dtype == fake.dtype, name
        assert value.dim() == fake.dim(), name
        for extent, size in zip(value.shape, fake.shape, strict=True):
            dim = self.dims.get(str(size), size)
            assert extent == (self.extents.setdefault(dim, extent) if isinstance(dim, str) else dim), name


def test_the_shapes_and_dtypes_stated_after_the_pipeline_are_true() -> None:
    config, program = tiny_config("all mechanisms"), tiny_program("all mechanisms")
    after, _ = PassManager(make_pipeline(Quantization())).run(program)
    verifier = verifier_for(config, program)
    sample = verifier.samples[1]
    values = {**sample.steps[0], **initial_states(after, sample)}
    values |= {spec.name: materialize_weight(spec, verifier.source) for spec in after.weights}
    checker = ShapeChecker(after)
    checker.run(*(values[spec.name] for spec in (*after.inputs, *after.states, *after.weights)))
    assert set(checker.extents) == {"T", "B", "B_plus_1", "L", "max_blocks", "num_blocks", "num_slots"}


def test_in_bfloat16_the_passes_bring_no_value_farther_from_float32() -> None:
    """A fused op rounds to BF16 as often as the ops that it replaces, or less often.

    So outputs and states may differ from those before the passes, but they must be as near to the float32 program:
    in RMS over all of them within 1.25 times, and each one within twice, the distance before. The config has no
    discrete choice: every expert is chosen, and every group fits into the indexer's budget. A choice that a rounding
    tips over would hide everything else.
    """
    overrides = {"num_experts_per_tok": 8, "indexer_budget": 256}
    config = ModelConfig.from_dict(tiny_config_dict(**overrides), "bfloat16")
    exact = export_program(config, "float32", BLOCK_SIZE)
    before = export_program(config, "bfloat16", BLOCK_SIZE)
    after, _ = PassManager(make_pipeline(Quantization())).run(before)
    verifier = Verifier(batch_samples(config.vocab_size, BLOCK_SIZE, 16), random_source(before.weights))
    errors = [errors_against(exact, rounded, verifier) for rounded in (before, after)]
    assert {key: error for key, error in errors[1].items() if error > 2 * errors[0][key]} == {}
    rms_before, rms_after = (math.hypot(*values.values()) / len(values) ** 0.5 for values in errors)
    # Eight bits of mantissa: one rounding is 1.1e-3 RMS, and some ten in a row are on the path to the last value.
    assert 1e-3 < rms_before < 2e-2
    assert rms_after < 1.25 * rms_before


def errors_against(exact: Program, rounded: Program, verifier: Verifier) -> dict[str, float]:
    """Relative error of each float output and state of each sample."""
    errors = {}
    for index, (expected, got) in enumerate(zip(verifier.run(exact), verifier.run(rounded), strict=True)):
        for name, value in expected.items():
            error = relative_error(value.float(), got[name].float())
            assert value.is_floating_point() or error == 0, name
            errors |= {f"{name} of sample {index}": error} if value.is_floating_point() else {}
    return errors


RELEASED_OPS = {
    "aten.embedding": 1,
    "aten.cat": 1,  # the streams of the first layer
    "aten.index_select": 3,  # stack, block output and inject of the rows whose logits are wanted
    "q4e.hc_norm": 2,  # the first layer's, and the one behind the n-gram embedding
    "q4e.hc_read": 94,  # of 96 half layers, less those two
    "q4e.hc_project": 2,
    "q4e.hc_combine_norm": 1,  # the final mixer's
    "q4e.hc_gate_mix": 3,
    # qkvz, ba and out in 36 layers; qkv, index_qk and o in 12; the n-gram embedding's key and value; the final mixer's
    # down projection, which has no inject to merge with; the head.
    "aten.linear": 3 * 36 + 3 * 12 + 2 + 1 + 1,
    "aten.div.Tensor": 1,
    "aten.silu": 1,
    "q4e.causal_conv1d": 36,
    "q4e.gated_delta_rule": 36,
    "q4e.qsa_indexer": 12,
    "q4e.qsa_select": 12,
    "q4e.qsa_attention": 12,
    "q4e.moe": 48,
    "q4e.ple_hash": 1,
    "q4e.ple_gather": 1,
    "q4e.ple_conv": 1,
    # The combine before the n-gram embedding.
    "aten.unsqueeze": 2,
    "aten.mul.Tensor": 1,
    "aten.view": 1,
    "aten.add.Tensor": 1,
}


@pytest.mark.slow
def test_the_released_model_goes_through_the_pipeline(released_export: ReleasedExport) -> None:
    before, start = released_export.program, time.perf_counter()
    after, _ = PassManager(make_pipeline(Quantization())).run(before)
    assert time.perf_counter() - start < 60
    assert ops_of(after) == RELEASED_OPS
    assert after.states == before.states
    # Merging and folding move weights around, none is lost or held twice. Only the constant that stands for the
    # selection where there is no indexer, a single element, is not read.
    assert num_elements(after) == num_elements(before) - 1


def num_elements(program: Program) -> int:
    return sum(math.prod(extent_of(dim, {}) for dim in spec.tensor.shape) for spec in program.weights)
