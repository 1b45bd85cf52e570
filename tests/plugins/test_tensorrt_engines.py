"""Every op's plugin, driven by TensorRT's own builder: both profiles, every dtype of its spec."""

from __future__ import annotations

import random
import struct
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from one_node_engines import (
    BF16,
    F32,
    FP8,
    LIMITS,
    TARGET,
    Variant,
    attrs_of,
    dynamic_dims,
    fake_results,
    one_node_engine,
    one_node_model,
    operands,
    profiles_of,
    record_questions,
    shapes_at,
    variants,
)

from qwen4exp_trt.builder.engine import build_engine
from qwen4exp_trt.builder.onnx_graph import ONNX_DTYPES, value_info
from qwen4exp_trt.builder.profiles import profile_dims
from qwen4exp_trt.errors import BuildError, PluginError
from qwen4exp_trt.plugins import tensorrt as shells
from qwen4exp_trt.plugins.dims import evaluate
from qwen4exp_trt.plugins.kernels import MAX_SMS
from qwen4exp_trt.plugins.registry import plugin_specs
from qwen4exp_trt.plugins.spec import ACTIVATION_DTYPES, NAMESPACE, Attr, OpSpec, TensorArg, dtypes_of, element_shape
from qwen4exp_trt.plugins.tensorrt import AttrFields, make_creators, take_callback_errors, torch_dtypes
from qwen4exp_trt.runtime.tensorrt.module import load_trt

pytestmark = pytest.mark.trt

NO_KERNEL = (Variant("linear", F32),)
"""What a spec allows and no kernel computes: the model's program has aten::linear there."""
VARIANTS = [each for dtype in ACTIVATION_DTYPES for each in variants(dtype)]
BUILT = [pytest.param(each, id=str(each)) for each in VARIANTS if each not in NO_KERNEL]
TRT_NAMES = {
    BF16: "BFloat16",
    F32: "Float",
    FP8: "FP8",
    torch.int32: "Int32",
    torch.int64: "Int64",
    torch.float4_e2m1fn_x2: "FP4",
}


@pytest.fixture(scope="module")
def trt() -> Any:
    return load_trt("tensorrt-rtx")


def args_of(variant: Variant) -> dict[str, TensorArg]:
    """Operands, outputs and updated states by their names in the network."""
    spec = variant.spec
    outputs = dict(zip(fake_results(variant), (*spec.outputs, *spec.states), strict=True))
    return {arg.name: arg for arg in spec.inputs} | outputs


def test_every_dtype_of_a_spec_is_tried() -> None:
    for spec in plugin_specs().values():
        tried = [operands(each) for each in VARIANTS if each.op == spec.name]
        for arg in spec.inputs:
            assert {made[arg.name].dtype for made in tried} == set(dtypes_of(arg.dtype, None)), (spec.name, arg.name)


# --- what it builds -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", BUILT)
def test_outputs_and_aliased_states_have_the_types_of_the_op(variant: Variant) -> None:
    build, _ = one_node_engine(variant)
    found = {t["name"]: (t["dtype"], t["dims"]) for t in build.layers["io_tensors"]}
    tensors = {**operands(variant), **fake_results(variant)}
    for name, arg in args_of(variant).items():
        shape = element_shape(tensors[name].shape, tensors[name].dtype)
        dims = [-1 if dynamic else size for size, dynamic in zip(shape, dynamic_dims(arg), strict=True)]
        assert found.pop(name) == (TRT_NAMES[tensors[name].dtype], dims), name
    assert not found
    assert build.layers["unread"] == []


@pytest.mark.parametrize("variant", BUILT)
def test_the_layers_tell_the_module_in_both_profiles(variant: Variant) -> None:
    build, _ = one_node_engine(variant)
    own = [layer for layer in build.layers["layers"] if layer["modules"]]
    assert {layer["profile"] for layer in own} == {"decode", "prefill"}
    assert all(layer["modules"] == [f"layers.0.{variant.op}"] for layer in own)


@pytest.mark.parametrize("variant", BUILT)
def test_every_tensor_was_asked_about_and_accepted(variant: Variant, trt: Any) -> None:
    _, asked = one_node_engine(variant)
    tensors = [{**operands(variant), **fake_results(variant)}[name] for name in args_of(variant)]
    types = [dtype for tensor in tensors for dtype, known in torch_dtypes(trt).items() if known == tensor.dtype]
    accepted = {position: found for position, found, is_accepted in asked.formats if is_accepted}
    assert accepted == {position: tuple(types[: position + 1]) for position in range(len(tensors))}


@pytest.mark.parametrize("variant", BUILT)
def test_output_shapes_are_those_of_the_op_in_each_profile(variant: Variant) -> None:
    """At the smallest, the typical and the largest shapes; TensorRT computes them from the plugin's expressions."""
    _, asked = one_node_engine(variant)
    inputs = [arg.name for arg in variant.spec.inputs]
    seen = set()
    for of_inputs, of_outputs in asked.configured:
        for place in range(3):
            shapes = dict(zip(inputs, (ranges[place] for ranges in of_inputs), strict=True))
            results = fake_results(variant, shapes).values()
            expected = [tuple(element_shape(result.shape, result.dtype)) for result in results]
            assert [ranges[place] for ranges in of_outputs] == expected
            seen.add(tuple(shapes.values()))
    for profile in profile_dims(LIMITS).values():
        for place in range(3):
            shapes = shapes_at(variant, {dim: extent[place] for dim, extent in profile.items()})
            assert tuple(shapes.values()) in seen


@pytest.mark.parametrize("variant", [each for each in BUILT if each.values[0].spec.launches is not None])
def test_workspace_holds_the_scratch_of_every_shape_in_the_profile(variant: Variant) -> None:
    """On every GPU: its number of multiprocessors is not known at the build."""
    _, asked = one_node_engine(variant)
    inputs, draw = [arg.name for arg in variant.spec.inputs], random.Random(0)
    dtypes = {name: operands(variant)[name].dtype for name in inputs}
    for profile in profile_dims(LIMITS).values():
        largest = shapes_at(variant, {dim: extent.max for dim, extent in profile.items()})
        sizes = {size for shapes, size in asked.workspaces if shapes == [largest[name] for name in inputs]}
        assert len(sizes) == 1
        for _ in range(40):
            drawn = {
                dim: draw.choice((extent.min, extent.max, draw.randint(extent.min, extent.max)))
                for dim, extent in profile.items()
            }
            drawn["B_plus_1"] = drawn["B"] + 1
            num_sms = draw.choice((1, 8, 48, 132, MAX_SMS))
            plan = variant.spec.plan(shapes_at(variant, drawn), dtypes, attrs_of(variant), num_sms)
            assert plan.scratch_bytes <= next(iter(sizes)), (drawn, num_sms)


def test_dims_are_computed_by_tensorrt_as_by_python(trt: Any) -> None:
    """Of an op whose outputs take every operation that the spec of one may have."""
    dims = ("(T + 6)//5", "K//(T + 1)", "1000//(T + 1)", "1000 - T", "T - 1 + 2", "3*T", "T*T//7")
    like = plugin_specs()["linear"]
    spec = replace(like, name="dims_example", outputs=(TensorArg("out", dims),), launches=None)
    (creator,) = make_creators(trt, [spec])
    assert trt.get_plugin_registry().register_creator(creator, NAMESPACE)
    try:
        with pytest.MonkeyPatch.context() as monkeypatch:
            asked = record_questions(monkeypatch)
            model = one_node_model(Variant("linear"))
            model.graph.node[0].op_type = spec.onnx_op_type
            model.graph.output[0].CopyFrom(value_info("out", BF16, [f"out{index}" for index in range(len(dims))]))
            build_engine(trt, model, profiles_of(Variant("linear")), TARGET)
    finally:
        trt.get_plugin_registry().deregister_creator(creator)
    assert len(asked.configured) == 2
    for (x, _), (out,) in asked.configured:
        for dim, found in zip(dims, zip(*out, strict=True), strict=True):
            sizes = [evaluate(dim, {"T": tokens, "K": width}) for tokens, width in x]
            assert found == (min(sizes), sizes[1], max(sizes)), dim


def test_a_dtype_without_kernel_says_what_to_use(trt: Any, capfd: pytest.CaptureFixture[str]) -> None:
    for variant in NO_KERNEL:
        with pytest.raises(BuildError, match=r"node layers\.0\.linear .*: q4e::linear: weight is torch.float32, its"):
            build_engine(trt, one_node_model(variant), profiles_of(variant), TARGET)


# --- what it refuses ------------------------------------------------------------------------------------------------

WRONG_TYPES = (torch.int64, torch.int32, F32, BF16)
"""That TensorRT and the kernels have as well: nothing else would refuse them."""


def build_with_wrong_type(trt: Any, variant: Variant, arg: TensorArg) -> str:
    model = one_node_model(variant)
    (info,) = [info for info in model.graph.input if info.name == arg.name]
    wrong = next(dtype for dtype in WRONG_TYPES if dtype not in dtypes_of(arg.dtype, None))
    info.type.tensor_type.elem_type = ONNX_DTYPES[wrong]
    with pytest.raises(BuildError) as error:
        build_engine(trt, model, profiles_of(variant), TARGET)
    return str(error.value)


def operands_of(variant: Variant) -> list[Any]:
    return [pytest.param(variant, arg, id=f"{variant}-{arg.name}") for arg in variant.spec.inputs]


FEW = [*operands_of(Variant("nvfp4_linear")), *operands_of(Variant("qsa_attention", BF16, FP8))]
ALL = [each for variant in BUILT for each in operands_of(variant.values[0]) if each.id not in {few.id for few in FEW}]


@pytest.mark.parametrize(
    "variant,arg", [*FEW, *(pytest.param(*each.values, id=each.id, marks=pytest.mark.slow) for each in ALL)]
)
def test_a_wrong_dtype_is_refused_by_name(trt: Any, variant: Variant, arg: TensorArg) -> None:
    """The state is refused as an operand or as its own update, whichever TensorRT asks about first."""
    message = build_with_wrong_type(trt, variant, arg)
    assert f"node layers.0.{variant.op} ({variant.spec.onnx_op_type}): " in message
    assert f"{arg.name} is " in message and ", expected " in message
    assert "find any supported" in message


# --- attributes -----------------------------------------------------------------------------------------------------

VALUES = {
    "int": st.integers(-(2**31), 2**31 - 1),
    "float": st.floats(width=32, allow_nan=False),
    "str": st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1),
    "int[]": st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1),
}


def spec_with(attrs: list[Attr]) -> OpSpec:
    like = plugin_specs()["linear"]
    return OpSpec("example", 3, like.inputs, like.outputs, tuple(attrs), like.body, like.reference, (), {})


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(sorted(VALUES)), max_size=6), st.data())
def test_attributes_survive_serialization(types: list[Any], data: st.DataObject) -> None:
    """What a plugin gives to be stored makes the same plugin when the engine is loaded."""
    trt = load_trt("tensorrt-rtx")
    spec = spec_with([Attr(f"attr{index}", kind) for index, kind in enumerate(types)])
    attrs = {attr.name: data.draw(VALUES[attr.type]) for attr in spec.attrs}
    (creator,) = make_creators(trt, [spec])
    fields = AttrFields(trt, spec, attrs)
    made = creator.create_plugin("first", fields.collection, None)
    again = creator.create_plugin("second", made.get_fields_to_serialize(), None)
    assert made.attrs == again.attrs == again.clone().attrs == attrs


def test_every_type_of_attribute_is_tried() -> None:
    assert VALUES.keys() == shells._FIELD_TYPES.keys()
    assert {attr.type for spec in plugin_specs().values() for attr in spec.attrs} <= VALUES.keys()


@pytest.mark.parametrize("variant", [pytest.param(each, id=str(each)) for each in variants(BF16)])
def test_attributes_are_stored_in_the_engine(variant: Variant) -> None:
    engine = one_node_engine(variant)[0].engine
    for attr in variant.spec.attrs:
        value = attrs_of(variant)[attr.name]
        codes = {"int": "i", "float": "f", "int[]": f"{len(value) if attr.type == 'int[]' else 0}i"}
        stored = value.encode() if attr.type == "str" else struct.pack(codes[attr.type], *_as_list(value))
        behind_name = engine.split(attr.name.encode())[1:]
        assert any(stored in part[:200] for part in behind_name), attr.name


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


# --- exceptions in what TensorRT calls ------------------------------------------------------------------------------


def fail(*args: Any) -> Any:
    raise ValueError("out of luck")


@pytest.mark.parametrize(
    "callback,broken",
    [
        ("get_output_data_types", (OpSpec, "output_dtypes")),
        ("get_output_shapes", (OpSpec, "output_shapes")),
        ("supports_format_combination", (shells, "dtypes_of")),
        ("get_workspace_size", (shells, "cached_plan")),
    ],
)
def test_what_fails_in_a_plugin_is_the_error_of_the_build(
    trt: Any, monkeypatch: pytest.MonkeyPatch, callback: str, broken: tuple[Any, str]
) -> None:
    variant = Variant("hc_project")
    model, profiles = one_node_model(variant), profiles_of(variant)
    monkeypatch.setattr(*broken, fail)
    with pytest.raises(BuildError) as error:
        build_engine(trt, model, profiles, TARGET)
    assert f": node layers.0.hc_project (Q4eHcProject): {callback}: ValueError: out of luck; " in str(error.value)
    assert "\n" not in str(error.value)
    assert take_callback_errors() == []


def test_a_node_without_an_attribute_says_which(trt: Any) -> None:
    variant = Variant("hc_project")
    model = one_node_model(variant)
    del model.graph.node[0].attribute[:]
    expected = (
        r"node layers\.0\.hc_project \(Q4eHcProject\): create_plugin: q4e::hc_project: the node lacks the .* hc_count"
    )
    with pytest.raises(BuildError, match=expected):
        build_engine(trt, model, profiles_of(variant), TARGET)


def test_a_build_that_succeeds_leaves_no_error(trt: Any) -> None:
    variant = Variant("qsa_attention", BF16, FP8)
    shells._callback_errors.append("of somebody before")
    build_engine(trt, one_node_model(variant), profiles_of(variant), TARGET)
    assert take_callback_errors() == []


def test_enqueue_keeps_its_error_for_the_backend(trt: Any) -> None:
    """TensorRT's bindings print it and fail the execution; `problems` of the log has it then."""
    variant = Variant("hc_project")
    (creator,) = make_creators(trt, [variant.spec])
    fields = AttrFields(trt, variant.spec, attrs_of(variant))
    plugin = creator.create_plugin("layers.0.x", fields.collection, None)
    with pytest.raises((AssertionError, PluginError, RuntimeError)):  # by whether torch has CUDA
        plugin.enqueue([], [], [], [], 0, 0)
    (error,) = take_callback_errors()
    assert error.startswith("node layers.0.x (Q4eHcProject): enqueue: ")
