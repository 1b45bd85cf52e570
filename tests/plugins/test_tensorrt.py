"""Every op's TensorRT plugin against the op itself, from its spec and sample cases alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from kernel_emulator import NUM_SMS, execute_emulated, run_emulated
from op_checks import equal_bits
from torch import Tensor

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.registry import plugin_specs
from qwen4exp_trt.plugins.spec import NAMESPACE, OpSpec, element_shape
from qwen4exp_trt.plugins.tensorrt import (
    AttrFields,
    attrs_from_fields,
    make_creators,
    register_creators,
    torch_dtypes,
)
from qwen4exp_trt.runtime.tensorrt.module import load_trt

pytestmark = pytest.mark.trt

SPECS = [pytest.param(spec, id=spec.name) for spec in plugin_specs().values()]
BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def trt() -> Any:
    return load_trt("tensorrt-rtx")


@pytest.fixture(scope="module")
def creators(trt: Any) -> dict[str, Any]:
    return {creator.spec.name: creator for creator in make_creators(trt, plugin_specs().values())}


def operands(spec: OpSpec) -> dict[str, Any]:
    """Of the first sample case, in BF16."""
    return spec.cases[0].make(BF16, torch.Generator().manual_seed(0))


def attrs_of(spec: OpSpec) -> dict[str, Any]:
    return {attr.name: operands(spec)[attr.name] for attr in spec.attrs}


@pytest.mark.parametrize("spec", SPECS)
def test_states_are_aliased_and_nothing_else(spec: OpSpec, creators: dict[str, Any]) -> None:
    plugin = plugin_of(spec, creators)
    names = [arg.name for arg in spec.inputs]
    expected = [-1] * len(spec.outputs) + [names.index(arg.name) for arg in spec.states]
    assert [plugin.get_aliased_input(index) for index in range(plugin.num_outputs)] == expected


@pytest.mark.parametrize("spec", SPECS)
def test_attributes_survive_fields(spec: OpSpec, trt: Any) -> None:
    """Also when memory that nobody holds is used again: a field is a bare pointer."""
    attrs = attrs_of(spec)
    fields = AttrFields(trt, spec, attrs)
    reused = [np.full(size, 77, np.int8) for size in range(1, 64) for _ in range(16)]
    back = attrs_from_fields(spec, fields.collection)
    assert reused
    for attr in spec.attrs:
        expected = torch.tensor(attrs[attr.name]).item() if attr.type == "float" else attrs[attr.name]
        assert back[attr.name] == (list(expected) if attr.type == "int[]" else expected)


def test_missing_attributes_are_named(trt: Any) -> None:
    spec = plugin_specs()["moe"]
    with pytest.raises(PluginError, match=r"q4e::moe: the node lacks the attributes num_experts_per_tok, norm_topk"):
        attrs_from_fields(spec, trt.PluginFieldCollection([]))


def plugin_of(spec: OpSpec, creators: dict[str, Any]) -> Any:
    creator = creators[spec.name]
    fields = AttrFields(load_trt("tensorrt-rtx"), spec, attrs_of(spec))
    return creator.create_plugin(spec.name, fields.collection, None)


@pytest.mark.parametrize("spec", SPECS)
def test_creator_is_named_as_the_onnx_node(spec: OpSpec, creators: dict[str, Any]) -> None:
    """And as no standard op: the parser would take that one."""
    creator, plugin = creators[spec.name], plugin_of(spec, creators)
    for part in (creator, plugin):
        name = part.name if part is creator else part.plugin_name
        assert (name, part.plugin_version, part.plugin_namespace) == (spec.onnx_op_type, str(spec.version), NAMESPACE)
    assert not onnx.defs.has(spec.onnx_op_type)
    assert [field.name for field in creator.field_names] == [attr.name for attr in spec.attrs]


@pytest.mark.parametrize("spec", SPECS)
def test_clone_is_the_same_plugin(spec: OpSpec, creators: dict[str, Any]) -> None:
    plugin = plugin_of(spec, creators)
    for copy in (plugin.clone(), plugin.attach_to_context(None)):
        assert copy is not plugin
        assert copy.spec is spec
        assert (copy.attrs, copy.num_outputs) == (plugin.attrs, plugin.num_outputs)


KERNELS = [spec for spec in plugin_specs().values() if spec.launches is not None]


@pytest.mark.parametrize("spec", [pytest.param(spec, id=spec.name) for spec in KERNELS])
def test_enqueue_runs_the_kernels_of_the_op(
    spec: OpSpec, creators: dict[str, Any], trt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the addresses that TensorRT gives, within the workspace that was asked for at the build."""
    given, expected_operands = operands(spec), operands(spec)
    expected = run_emulated(spec, [expected_operands[arg.name] for arg in (*spec.inputs, *spec.attrs)])
    plugin = plugin_of(spec, creators)
    types = {dtype: trt_type for trt_type, dtype in torch_dtypes(trt).items()}

    def desc(tensor: Tensor) -> Any:
        shape = element_shape(tensor.shape, tensor.dtype)
        now = SimpleNamespace(dims=shape, type=types[tensor.dtype])
        return SimpleNamespace(**vars(now), max=shape, desc=now)

    inputs = [given[arg.name] for arg in spec.inputs]
    outputs = [torch.empty_like(output) for output in expected]
    states = [given[state.name] for state in spec.states]
    workspace = torch.full((plugin.get_workspace_size(list(map(desc, inputs)), []) + 256,), 255, dtype=torch.uint8)

    def execute(plan: Any, pointers: Any, scratch: int, *_: Any) -> None:
        assert scratch == workspace.data_ptr()
        assert plan.scratch_bytes <= len(workspace)
        execute_emulated(plan, pointers)

    monkeypatch.setattr("qwen4exp_trt.plugins.tensorrt.execute", execute)
    monkeypatch.setattr("qwen4exp_trt.plugins.tensorrt.num_multiprocessors", lambda device: NUM_SMS)
    monkeypatch.setattr("qwen4exp_trt.plugins.tensorrt.semaphores", lambda device: workspace)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    everything = [*outputs, *states]
    addresses = ([tensor.data_ptr() for tensor in part] for part in (inputs, everything))
    plugin.enqueue(list(map(desc, inputs)), list(map(desc, everything)), *addresses, workspace.data_ptr(), 0)
    assert all(map(equal_bits, outputs, expected))
    assert all(equal_bits(given[arg.name], expected_operands[arg.name]) for arg in spec.inputs)


def test_creators_are_registered_once(trt: Any) -> None:
    registered = register_creators(trt)
    assert register_creators(trt) is registered
    assert {creator.spec.name for creator in registered} == set(plugin_specs())
