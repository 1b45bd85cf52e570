"""What differs between bundles."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import bundles
import pytest

from qwen4exp_trt.builder.inspection.bundle import StepRequest, inspect_bundle
from qwen4exp_trt.builder.inspection.diff import ABSENT, Difference, format_differences, list_differences
from qwen4exp_trt.builder.inspection.document import Inspection, Op
from qwen4exp_trt.builder.plan_report import size


@pytest.fixture(scope="module")
def fp8_inspection(mtp_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    """As `float_inspection`, with an FP8 KV cache and a longer context."""
    options = {"kv_cache_dtype": "fp8", "max_seq_len": 128, "draft_head": "none"}
    with bundles.quick_builds():
        bundle = bundles.build(mtp_checkpoint, tmp_path_factory.mktemp("fp8") / "bundle", **options)
    return inspect_bundle(bundle, StepRequest(context=63))


def facts(differences: list[Difference], section: str) -> dict[str, tuple[str, str]]:
    return {each.name: (each.this, each.other) for each in differences if each.section == section}


def test_a_bundle_equals_itself(inspection: Inspection) -> None:
    assert list_differences(inspection, inspection) == []
    assert format_differences([]) == "no difference"


def test_options_states_and_bytes(float_inspection: Inspection, fp8_inspection: Inspection) -> None:
    differences = list_differences(float_inspection, fp8_inspection)
    assert facts(differences, "options") == {"kv_cache_dtype": ("float32", "float8_e4m3fn")}
    assert facts(differences, "limits") == {"max_seq_len": ("64", "128")}
    paged = facts(differences, "model: states")
    assert paged.keys() == {"layers.1.self_attn.kv_cache", "layers.1.self_attn.indexer.index_k_cache"}
    assert paged["layers.1.self_attn.kv_cache"] == (
        "float32[num_blocks, 2, 8, 2, 16], 16.00 KiB a sequence",
        "float8_e4m3fn[num_blocks, 2, 8, 2, 16], 8.00 KiB a sequence",
    )
    decode = facts(differences, "model: ops in decode")
    assert [*decode] == ["layers.1.self_attn.qsa_attention"]  # a longer limit costs a step nothing
    # 19 tokens of 16 and an open group are read, one is written: of 256 or 64 bytes, beside 144 of weights.
    assert decode == {"layers.1.self_attn.qsa_attention": ("5.26 kB, 4.86 kFLOP", "1.42 kB, 4.86 kFLOP")}
    assert facts(differences, "model: ops in prefill").keys() == decode.keys()
    assert facts(differences, "model: a step").keys() == {"decode", "prefill"}
    assert facts(differences, "model: ops") == {} and facts(differences, "model: weights") == {}
    others = list_differences(float_inspection, fp8_inspection, "layers.0.*")
    assert {each.section for each in others} == {"options", "limits", "model: a step"}


def test_an_engine_and_a_draft_head_more(inspection: Inspection, float_inspection: Inspection) -> None:
    differences = list_differences(inspection, float_inspection)
    assert facts(differences, "parts") == {"draft head": ("there", ABSENT)}
    engine = facts(differences, "model: engine")
    assert engine["target"] == ("sm121", ABSENT) and engine["size"][1] == ABSENT
    weights = facts(differences, "model: weights")
    assert weights["embed_tokens.weight"] == ("bfloat16[384, 32], 24.00 KiB", "float32[384, 32], 48.00 KiB")
    layers = facts(differences, "model: engine layers in decode")
    assert layers["layers.0.mlp.moe"] == ("custom_layer", ABSENT)
    assert facts(differences, "model: ops")["layers.0.mlp.moe"] == (
        "q4e.moe (plugin) -> bf16[T, 32]",
        "q4e.moe (plugin) -> f32[T, 32]",
    )


def change_model(inspection: Inspection, **change: object) -> Inspection:
    """With other fields of the model."""
    model, *others = inspection.parts
    return replace(inspection, parts=[replace(model, **change), *others])  # type: ignore[arg-type]


def change_op(inspection: Inspection, path: str, change: dict[str, object]) -> Inspection:
    """With other fields of one op of the model."""

    def changed(op: Op) -> Op:
        return replace(op, **change) if op.path == path else op  # type: ignore[arg-type]

    return change_model(inspection, ops=[changed(op) for op in inspection.parts[0].ops])


def test_ops_that_only_one_has_and_ops_under_another_name(inspection: Inspection) -> None:
    model = inspection.parts[0]
    moe = "layers.0.mlp.moe"
    renamed = change_op(inspection, moe, {"path": "layers.0.mlp.nvfp4_moe", "op": "q4e.nvfp4_moe"})
    (difference,) = list_differences(inspection, renamed)
    assert (difference.section, difference.name) == ("model: ops", moe)
    assert difference.other == "q4e.nvfp4_moe (plugin) -> bf16[T, 32]"
    fewer = change_model(inspection, ops=[op for op in model.ops if op.path != moe])
    (gone,) = list_differences(inspection, fewer)
    assert (gone.this, gone.other) == ("q4e.moe (plugin) -> bf16[T, 32]", ABSENT)
    (new,) = list_differences(fewer, inspection)
    assert (new.this, new.other) == (ABSENT, gone.this)
    assert list_differences(inspection, fewer, "layers.1.*") == []


@pytest.mark.parametrize("profile", ["decode", "prefill"])
def test_a_fusion_is_a_difference(inspection: Inspection, profile: str) -> None:
    model = inspection.parts[0]
    assert model.engine is not None
    moe = next(op for op in model.ops if op.path == "layers.0.mlp.moe")
    (index,) = moe.engine_layers[profile]
    layers = list(model.engine.layers)
    layers[index] = replace(layers[index], ops=[moe.path, "layers.0.mlp.other"])
    (difference,) = list_differences(inspection, change_model(inspection, engine=replace(model.engine, layers=layers)))
    section = f"model: engine layers in {profile}"
    assert difference == Difference(section, moe.path, "custom_layer", "custom_layer of 2 ops")


def test_facts_of_a_whole_part_are_compared(inspection: Inspection) -> None:
    model = inspection.parts[0]
    engine, first = model.engine, model.passes[0]
    assert engine is not None
    memory, count = engine.activation_bytes, sum(layer.profile == "prefill" for layer in engine.layers)
    changes: list[tuple[dict[str, object], tuple[str, str, str, str]]] = [
        (
            {"passes": [{**first, "rewrites": 99}, *model.passes[1:]]},
            ("model: passes", first["name"], f"{first['rewrites']} rewrites", "99 rewrites"),
        ),
        ({"debug_outputs": ["cat"]}, ("model: outputs for debugging", "cat", ABSENT, "there")),
        (
            {"engine": replace(engine, activation_bytes={**memory, "decode": 1024})},
            ("model: engine", "activations in decode", size(memory["decode"]), "1.00 KiB"),
        ),
        (
            {"engine": replace(engine, layers=[*engine.layers, engine.layers[-1]])},
            ("model: engine", "layers in prefill", str(count), str(count + 1)),
        ),
    ]
    for change, expected in changes:
        assert list_differences(inspection, change_model(inspection, **change)) == [Difference(*expected)]
    newer = replace(inspection, plugins={**inspection.plugins, "moe": inspection.plugins["moe"] + 1})
    assert [(each.section, each.name) for each in list_differences(inspection, newer)] == [("ops", "moe")]


def test_layers_that_differ_alike_are_one_row() -> None:
    differences = [Difference("model: ops", f"layers.{index}.mlp.moe", "a", "b") for index in range(3)]
    differences.append(Difference("options", "precision", "bf16", "nvfp4"))
    assert format_differences(differences).splitlines() == [
        "model: ops                 this  other",
        "layers.{0,1,2}.mlp.moe x3  a     b",
        "",
        "options    this  other",
        "precision  bf16  nvfp4",
    ]
