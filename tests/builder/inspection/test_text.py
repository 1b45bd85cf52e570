"""The text of an inspection."""

from __future__ import annotations

from dataclasses import replace

from qwen4exp_trt.builder.inspection.document import Inspection
from qwen4exp_trt.builder.inspection.folding import fold
from qwen4exp_trt.builder.inspection.text import format_inspection
from qwen4exp_trt.builder.plan_report import size, traffic


def rows_of(text: str, start: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"{start} ")]


def row_of(text: str, start: str) -> str:
    (row,) = rows_of(text, start)
    return row


def test_names_of_alike_layers_fold_into_one() -> None:
    names = [f"layers.{index}.mlp.moe" for index in range(6)] + ["layers.0.mlp.gate", "lm_head"]
    folds = fold(names, str, len)
    assert [group.label for group in folds] == ["layers.{0,1,2,3,..}.mlp.moe x6", "layers.0.mlp.gate", "lm_head"]
    apart = fold(names[:3], str, lambda name: name == names[1])
    assert [group.label for group in apart] == ["layers.{0,2}.mlp.moe x2", "layers.1.mlp.moe"]


def test_rows_of_the_report(inspection: Inspection) -> None:
    text = format_inspection(inspection)
    assert row_of(text, "target").endswith("sm121 (GB10): at most 233 GB/s and 105 TFLOP/s in BF16, as others measured")
    assert "1 new token of 1 sequence behind 63; T 1..24, typically 3, L 1..24, typically 3\n" in text
    assert row_of(text, "pools").endswith("  num_blocks 1..1048576, typically 24, num_slots 1..65536, typically 3")
    assert text.count("\ncomponent ") == 2  # of the model and of its draft head
    moe = row_of(text, "layers.{0,1}.mlp.moe x2")
    expected = sum(op.costs["decode"].weight_bytes for op in inspection.parts[0].ops if op.op == "q4e.moe")
    assert f"{expected / 1e3:.2f} kB" in moe
    model = inspection.parts[0]
    attention = next(op for op in model.ops if op.op == "q4e.qsa_attention")
    costs = [attention.costs[profile] for profile in inspection.profiles]
    for moved in (traffic(cost.weight_bytes + cost.state_bytes) for cost in costs):
        assert f" {moved} " in row_of(text, attention.path)
    assert model.engine is not None
    scratch = size(model.engine.scratch_bytes["prefill"])
    assert rows_of(text, "activations")[0].endswith(f" in prefill ({scratch} of it scratch)")
    lines = text.splitlines()
    types = lines[lines.index(moe) + 1]
    assert types.startswith("    plugin, custom_layer: bf16[T, 32], ") and types.endswith(" -> bf16[T, 32]")
    norm = row_of(text, "mtp.pre_fc_norm_hidden.hc_norm")
    assert "custom_layer: bf16[T, 128], f32[128] -> bf16[T, 128]" in lines[lines.index(norm) + 1]
    assert "    native, kgen of 2 ops: bf16[384, 32] -> bf16[T, 32]" in lines  # without the ids
    state = row_of(text, "layers.1.self_attn.kv_cache")
    assert "[num_blocks, 2, 8, 2, 16]" in state and state.endswith("qsa_attention")
    gain = row_of(text, "layers.{0,1}.attn_hyper_connection.hc_norm.add.weight x2")
    gains = [weight for weight in model.weights if weight.name.endswith("attn_hyper_connection.hc_norm.add.weight")]
    assert len(gains) == 2 and f" {size(sum(weight.num_bytes for weight in gains))}  " in gain
    assert gain.endswith("model.layers.*.attn_hyper_connection.hc_norm.weight (cast, add)")
    assert max(map(len, lines)) < 260 and all(line == line.rstrip() for line in lines)


def test_what_differs_is_not_folded(inspection: Inspection) -> None:
    model = inspection.parts[0]
    assert model.engine is not None
    moe = next(op for op in model.ops if op.path == "layers.1.mlp.moe")
    dearer = {name: replace(cost, weight_bytes=cost.weight_bytes + 1) for name, cost in moe.costs.items()}
    ops = [replace(op, costs=dearer) if op is moe else op for op in model.ops]
    text = format_inspection(replace(inspection, parts=[replace(model, ops=ops)]))
    assert row_of(text, "layers.0.mlp.moe") and row_of(text, "layers.1.mlp.moe")
    layers = list(model.engine.layers)
    (index,) = moe.engine_layers["prefill"]
    layers[index] = replace(layers[index], type="gemm")
    state = next(state for state in model.states if state.name == "layers.1.self_attn.kv_cache")
    states = [*model.states, replace(state, name="layers.5.self_attn.kv_cache")]
    part = replace(model, states=states, engine=replace(model.engine, layers=layers))
    text = format_inspection(replace(inspection, parts=[part]))
    lines = text.splitlines()
    assert row_of(text, "layers.0.mlp.moe")
    types = lines[lines.index(row_of(text, "layers.1.mlp.moe")) + 1]
    assert types.startswith("    plugin, custom_layer in decode, gemm in prefill: bf16")
    cells = [cell.strip() for cell in row_of(text, "layers.{1,5}.self_attn.kv_cache x2").split("  ")]
    assert {f"{size(state.row_bytes)} each", size(2 * state.sequence_bytes)} <= {*cells}


def test_each_layer_by_itself_and_a_selection(inspection: Inspection) -> None:
    text = format_inspection(inspection, fold_layers=False, pattern="layers.1.*")
    assert " x2" not in text and "layers.0." not in text
    assert text.count("\nstate  ") == 1  # the draft head has none of such a name
    assert row_of(text, "layers.1.mlp.moe") and row_of(text, "layers.1.self_attn.kv_cache")
    whole = row_of(format_inspection(inspection), "routed experts")
    assert row_of(text, "routed experts") == whole  # of the whole part, whatever is listed


def test_a_bundle_without_engine(float_inspection: Inspection) -> None:
    text = format_inspection(float_inspection)
    assert row_of(text, "target").endswith("none: a bundle without an engine")
    assert row_of(text, "engine").split() == ["engine", "none"]
    assert "at least" not in text and "draft head" not in text


def test_warnings_are_the_last_lines(inspection: Inspection) -> None:
    warned = replace(inspection, warnings=["two lines were not read"])
    assert format_inspection(warned).splitlines()[-1] == "warning: two lines were not read"
