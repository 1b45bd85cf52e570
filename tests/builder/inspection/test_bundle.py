"""What an inspection says of a bundle, against the program, the checkpoint and the engine's report."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from qwen4exp_trt.builder.inspection.bundle import DECODE, PREFILL, StepRequest, inspect_bundle
from qwen4exp_trt.builder.inspection.document import Inspection, Op, Part
from qwen4exp_trt.builder.inspection.program_ops import ProgramOps, read_onnx
from qwen4exp_trt.builder.inspection.text import format_inspection
from qwen4exp_trt.errors import BundleError, RequestError
from qwen4exp_trt.plugins.cost import StepSize
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.manifest import FileRef, Manifest
from qwen4exp_trt.runtime.program_text import load_program
from qwen4exp_trt.runtime.specs import TensorSpec
from qwen4exp_trt.runtime.step_costs import step_cost
from qwen4exp_trt.runtime.target_devices import DEVICES


def op_named(part: Part, path: str) -> Op:
    return next(op for op in part.ops if op.path == path)


@pytest.fixture
def copy(engine_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the bundle, to be damaged."""
    return Path(shutil.copytree(engine_bundle, tmp_path / "bundle"))


def rewrite(bundle: Path, name: str, change: Callable[[str], str]) -> None:
    """Change the text of a file of the bundle, whose manifest then says that it is so."""
    path = bundle / name
    path.write_text(change(path.read_text()))
    manifest = Manifest.load(bundle)
    manifest.files[name] = FileRef.of(path)
    manifest.save(bundle)


def test_every_op_reads_what_is_there_before_it(inspection: Inspection) -> None:
    for part in inspection.parts:
        known = {*part.inputs, *(state.name for state in part.states), *(weight.name for weight in part.weights)}
        assert known == {name for name, value in part.values.items() if value.kind != "result"}
        for op in part.ops:
            assert known >= {*op.inputs}, op.path
            assert op.outputs and {*op.updates} <= {*op.inputs}
            known |= {*op.outputs}
        assert known == {*part.values} and {*part.outputs} <= known
        assert len({op.path for op in part.ops}) == len(part.ops)


def test_dynamic_dims_are_named(inspection: Inspection) -> None:
    shapes = [value.shape for part in inspection.parts for value in part.values.values()]
    named = {dim for shape in shapes for dim in shape if isinstance(dim, str)}
    for profile in inspection.profiles.values():
        assert named - {*profile.dims} == {"4*T"}  # of the draft head: the streams of each token
        assert profile.dims.keys() == profile.step.dims.keys()
    steps = {name: profile.step.dims for name, profile in inspection.profiles.items()}
    pools = {"max_blocks": 8, "num_blocks": 8, "num_slots": 1}
    assert steps[DECODE] == {"T": 1, "B": 1, "B_plus_1": 2, "L": 1, **pools}
    assert steps[PREFILL] == {"T": 8, "B": 1, "B_plus_1": 2, "L": 1, **pools, "max_blocks": 1, "num_blocks": 1}


def test_ops_of_several_nodes_and_results(inspection: Inspection) -> None:
    model = inspection.parts[0]
    read = op_named(model, "layers.1.attn_hyper_connection.hc_read")
    assert (read.op, read.kind, read.layer, read.component) == ("q4e.hc_read", "plugin", 1, "hyper-connections")
    assert [name.rpartition(".")[2] for name in read.outputs] == ["combined", "mixed", "inject"]
    assert [node.op_type for node in read.onnx_nodes] == ["Q4eHcRead"]
    divided = next(op for op in model.ops if op.op == "aten.div")
    assert divided.kind == "native" and divided.inputs == [
        divided.path.replace(".div", ".input_mix_weight_down.linear")
    ]
    moe = op_named(model, "layers.0.mlp.moe")
    assert moe.component == "routed experts" and model.values[moe.outputs[0]].shape == ["T", 32]


def test_states_know_who_uses_them(inspection: Inspection) -> None:
    model = inspection.parts[0]
    states = {state.name: state for state in model.states}
    keys = states["layers.1.self_attn.indexer.index_k_cache"]
    assert keys.updated_by == "layers.1.self_attn.indexer.qsa_indexer"
    assert keys.read_by == [keys.updated_by, "layers.1.self_attn.indexer.qsa_select"]
    assert keys.is_paged and keys.sequence_bytes == 8 * keys.row_bytes  # 64 tokens in pages of 8
    ring = states["layers.0.linear_attn.conv_state"]
    assert not ring.is_paged and ring.sequence_bytes == ring.row_bytes


def test_weights_come_from_the_checkpoint(inspection: Inspection, mtp_checkpoint: Path) -> None:
    stored = Checkpoint.open(mtp_checkpoint).names
    for part in inspection.parts:
        for weight in part.weights:
            assert {*weight.sources} <= {*stored} and weight.read_by, weight.name
    weights = {weight.name: weight for weight in inspection.parts[0].weights}
    gain = weights["layers.0.attn_hyper_connection.hc_norm.add.weight"]
    assert (gain.dtype, gain.transforms) == ("float32", ["cast", "add"])
    assert weights["inv_freq"].sources == [] and weights["inv_freq"].num_bytes == 4 * 4


def test_costs_add_up(inspection: Inspection, engine_bundle: Path) -> None:
    sizes = {DECODE: StepSize(1, 1, 63), PREFILL: StepSize(1, 8, 0)}
    for part, folder in zip(inspection.parts, ("", "mtp"), strict=True):
        program = load_program(engine_bundle / folder / "program")
        for profile, size in sizes.items():
            cost, total = step_cost(program, size), part.totals[profile]
            assert (total.weight_bytes, total.state_bytes, total.flops) == (
                *(cost.weight_bytes, cost.state_bytes, cost.flops),
            )
            ops = [op.costs[profile] for op in part.ops]
            components = [component.costs[profile] for component in part.components]
            for parts in (ops, components):
                assert sum(each.share for each in parts) == pytest.approx(1)
                assert sum(each.seconds or 0 for each in parts) == pytest.approx(total.seconds)
                assert sum(each.weight_bytes for each in parts) == cost.weight_bytes
            bandwidth = DEVICES["sm121"].bytes_per_second
            assert (total.seconds or 0) >= cost.memory_bytes / bandwidth * 0.999
        resident = sum(component.weight_bytes for component in part.components)
        assert resident == sum(weight.num_bytes for weight in part.weights)


def test_steps_are_those_asked_for(engine_bundle: Path) -> None:
    inspection = inspect_bundle(engine_bundle, StepRequest(batch=3, context=10, prefill_context=56))
    steps = {name: profile.step for name, profile in inspection.profiles.items()}
    assert (steps[DECODE].num_seqs, steps[DECODE].num_tokens, steps[DECODE].context_len) == (3, 3, 10)
    assert (steps[PREFILL].num_seqs, steps[PREFILL].num_tokens, steps[PREFILL].context_len) == (1, 8, 56)
    assert inspection.profiles[DECODE].dims["T"] == [1, 3, 24]


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (StepRequest(batch=4), "--batch is 4; the bundle takes 1 to 3 sequences"),
        (StepRequest(context=64), "--context is 64; in front of 1 new tokens the bundle takes 0 to 63"),
        (StepRequest(prefill_context=57), "--prefill-context is 57; in front of 8 new tokens the bundle takes 0 to 56"),
    ],
)
def test_steps_that_the_bundle_has_no_room_for(engine_bundle: Path, request_: StepRequest, message: str) -> None:
    with pytest.raises(RequestError, match=f"{engine_bundle}: {message}"):
        inspect_bundle(engine_bundle, request_)


# --- the engine ------------------------------------------------------------------------------------------------------


@pytest.mark.trt
def test_every_op_that_does_something_has_layers_in_each_profile(inspection: Inspection) -> None:
    for part in inspection.parts:
        assert part.engine is not None
        for op in part.ops:
            for profile in (DECODE, PREFILL) if op.kind != "view" else ():
                layers = [part.engine.layers[index] for index in op.engine_layers[profile]]
                assert layers and all(op.path in layer.ops and layer.profile == profile for layer in layers), op.path


@pytest.mark.trt
def test_plugins_and_fused_ops_in_the_engine(inspection: Inspection) -> None:
    model = inspection.parts[0]
    assert model.engine is not None
    layers = {layer.name: layer for layer in model.engine.layers if layer.profile == DECODE}
    conv = layers["layers.0.linear_attn.causal_conv1d"]
    assert (conv.type, conv.plugin, conv.ops) == ("PluginV3", "Q4eCausalConv1d", [conv.name])
    assert conv.outputs[0].dtype == "BFloat16"
    first = op_named(model, "embed_tokens.embedding")
    (index,) = first.engine_layers[DECODE]
    assert len(model.engine.layers[index].ops) > 1  # with the streams that start from it
    assert model.engine.num_bytes > 100_000 and model.engine.scratch_bytes[PREFILL] > 0


@pytest.mark.trt
def test_what_the_build_reported_is_passed_on(inspection: Inspection, engine_bundle: Path) -> None:
    manifest = Manifest.load(engine_bundle)
    assert manifest.draft is not None
    assert [part.passes for part in inspection.parts] == [manifest.passes, manifest.draft.passes]
    for part, folder in zip(inspection.parts, ("", "mtp"), strict=True):
        report, engine = json.loads((engine_bundle / folder / "layers.json").read_text()), part.engine
        assert engine is not None
        for name in ("activation_bytes", "scratch_bytes", "constant_bytes", "unread"):
            assert getattr(engine, name) == report[name], name
        for layer, told in zip(engine.layers, report["layers"], strict=True):
            assert (layer.name, layer.tactic, layer.plugin) == (told["name"], told.get("tactic"), told.get("plugin"))
            assert [asdict(tensor) for tensor in layer.inputs] == told["inputs"]


def test_values_that_are_outputs_for_debugging(copy: Path) -> None:
    manifest = Manifest.load(copy)
    assert manifest.draft is not None
    of_draft = replace(manifest.draft, debug_outputs=(TensorSpec("mtp.view", ("T", 4), "float32"),))
    replace(manifest, debug_outputs=(TensorSpec("cat", ("T", 4), "float32"),), draft=of_draft).save(copy)
    parts = inspect_bundle(copy, StepRequest()).parts
    assert [part.debug_outputs for part in parts] == [["cat"], ["mtp.view"]]
    assert format_inspection(inspect_bundle(copy, StepRequest())).count("1 values are outputs too, for debugging") == 2


def test_lines_that_were_not_read_are_warned_of(copy: Path) -> None:
    rewrite(copy, "layers.json", lambda text: json.dumps(json.loads(text) | {"unread": ["Name: odd", "and more"]}))
    (warning,) = inspect_bundle(copy, StepRequest()).warnings
    assert warning == "model: 2 lines of TensorRT's layer report could not be read, such as: Name: odd"


# --- other bundles ---------------------------------------------------------------------------------------------------


def test_a_bundle_without_engine_has_no_floors(float_inspection: Inspection) -> None:
    (model,) = float_inspection.parts
    assert float_inspection.target is None and model.engine is None
    assert all(op.engine_layers == {} and op.costs[DECODE].seconds is None for op in model.ops)
    assert sum(op.costs[DECODE].share for op in model.ops) == pytest.approx(1)
    assert {op.costs[DECODE].bound for op in model.ops} == {"none"}


def test_the_document_is_plain_json(inspection: Inspection) -> None:
    document = inspection.to_json()
    assert json.loads(json.dumps(document)) == document
    assert list(document) == [field.name for field in fields(Inspection)] and document["schema_version"] == 1


@pytest.mark.parametrize("name", ["decoder.onnx", "layers.json", "mtp/decoder.onnx", "program/graph.py"])
def test_missing_files_are_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    with pytest.raises(BundleError, match=rf"damaged bundle: .*{name} is missing.*build it again"):
        inspect_bundle(copy, StepRequest())


def test_a_report_in_another_form_is_refused(copy: Path) -> None:
    rewrite(copy, "layers.json", lambda text: json.dumps({"layers": [{"name": "x"}]}))
    with pytest.raises(BundleError, match=r"layers\.json: not the layers of an engine"):
        inspect_bundle(copy, StepRequest())


def test_an_onnx_model_of_another_program_is_refused(engine_bundle: Path, tmp_path: Path) -> None:
    program = load_program(engine_bundle / "program")
    other = engine_bundle / "mtp" / "decoder.onnx"
    with pytest.raises(BundleError, match=r"its node mtp\.\S+ is of no op of the program beside it"):
        ProgramOps(program, read_onnx(other), other)
    model = read_onnx(engine_bundle / "decoder.onnx")
    del model.graph.node[3:]
    with pytest.raises(BundleError, match=r"has no node .*, which the program beside it has"):
        ProgramOps(program, model, other)
    (tmp_path / "damaged.onnx").write_bytes(b"\xff" * 100)
    with pytest.raises(BundleError, match=r"damaged\.onnx: not an ONNX model"):
        read_onnx(tmp_path / "damaged.onnx")
