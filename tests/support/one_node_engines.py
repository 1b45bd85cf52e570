"""Networks of one op, with the dims dynamic that are so in the model, and their engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import onnx
import pytest
import torch
from onnx import helper
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from qwen4exp_trt.builder.engine import EngineBuild, build_engine
from qwen4exp_trt.builder.onnx_graph import OPSET, PLUGIN_OPSET, value_info
from qwen4exp_trt.builder.profiles import Profile, ShapeRange, profile_dims
from qwen4exp_trt.plugins.registry import plugin_specs
from qwen4exp_trt.plugins.spec import NAMESPACE, OpSpec, TensorArg, element_shape
from qwen4exp_trt.plugins.tensorrt import _OpPlugin
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.tensorrt.module import load_trt

BF16, F32, FP8 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
TARGET = "sm121"
LIMITS = EngineLimits(max_batch_size=4, max_seq_len=512, prefill_chunk=128, block_size=16)

_OF_PROGRAM = {
    "T": "T",
    "TS": "T",
    "L": "L",
    "B": "B",
    "B + 1": "B_plus_1",
    "BP": "B_plus_1",
    "MB": "max_blocks",
    "NB": "num_blocks",
}
"""Dims of ops -> what they are in the model's program, if they are dynamic there."""


@dataclass(frozen=True)
class Variant:
    """An op with dtypes that its spec allows: of activations, and of a KV cache."""

    op: str
    activation: torch.dtype = BF16
    cache: torch.dtype | None = None

    @property
    def spec(self) -> OpSpec:
        return plugin_specs()[self.op]

    def __str__(self) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in (self.activation, self.cache) if dtype is not None]
        return "-".join([self.op, *names])


def variants(activation: torch.dtype) -> list[Variant]:
    """Every plugin with that activation dtype, and with an FP8 cache as well if it takes one."""
    found = []
    for op, spec in plugin_specs().items():
        classes = {arg.dtype for arg in (*spec.inputs, *spec.outputs)}
        if activation == BF16 or any(name.startswith("activation") for name in classes):
            found.append(Variant(op, activation))
        if "activation or float8_e4m3fn" in classes:
            found.append(Variant(op, activation, FP8))
    return found


@cache
def operands(variant: Variant) -> dict[str, Any]:
    """Of the first sample case with these dtypes."""
    for case in variant.spec.cases:
        made = case.make(variant.activation, torch.Generator().manual_seed(0))
        has_fp8_cache = made["kv_cache"].dtype == FP8 if "kv_cache" in made else False
        if has_fp8_cache == (variant.cache == FP8):
            return made
    raise AssertionError(f"no case of {variant}")


def attrs_of(variant: Variant) -> dict[str, Any]:
    made = operands(variant)
    return {attr.name: made[attr.name] for attr in variant.spec.attrs}


def fake_results(variant: Variant, shapes: Mapping[str, Sequence[int]] | None = None) -> dict[str, Tensor]:
    """What the op's fake body gives, without data: its outputs, then its states. ``shapes`` of the operands are in
    elements; those of the sample case by default."""
    made, spec = operands(variant), variant.spec
    with FakeTensorMode():
        args: list[Any] = []
        for arg in spec.inputs:
            shape = list(shapes[arg.name]) if shapes else element_shape(made[arg.name].shape, made[arg.name].dtype)
            packed = 2 if made[arg.name].dtype == torch.float4_e2m1fn_x2 else 1
            args.append(torch.empty([*shape[:-1], shape[-1] // packed], dtype=made[arg.name].dtype))
        outputs = spec.overload(*args, *attrs_of(variant).values())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    states = [value for value, arg in zip(args, spec.inputs, strict=True) if arg.mutated]
    names = [arg.name for arg in spec.outputs] + [f"{arg.name}_out" for arg in spec.states]
    return dict(zip(names, [*outputs, *states], strict=True))


def dynamic_dims(arg: TensorArg) -> list[str | None]:
    """For each dim of an operand or output, what it is in the program if it is dynamic there."""
    names = [_OF_PROGRAM.get(dim) if isinstance(dim, str) else None for dim in arg.dims]
    if arg.dims[0] == "S" and arg.mutated:
        names[0] = "num_slots"
    return names


def one_node_model(variant: Variant) -> onnx.ModelProto:
    spec, made, outputs = variant.spec, operands(variant), fake_results(variant)
    attrs = attrs_of(variant) | {"plugin_version": str(spec.version)}
    inputs = [arg.name for arg in spec.inputs]
    node = helper.make_node(
        spec.onnx_op_type, inputs, list(outputs), f"layers.0.{spec.name}", domain=NAMESPACE, **attrs
    )

    def info(name: str, arg: TensorArg, tensor: Tensor) -> onnx.ValueInfoProto:
        dims = zip(tensor.shape, dynamic_dims(arg), strict=True)
        return value_info(name, tensor.dtype, [dynamic or size for size, dynamic in dims])

    results_of = dict(zip(outputs, (*spec.outputs, *spec.states), strict=True))
    graph = helper.make_graph(
        [node],
        spec.name,
        [info(arg.name, arg, made[arg.name]) for arg in spec.inputs],
        [info(name, arg, outputs[name]) for name, arg in results_of.items()],
    )
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(NAMESPACE, PLUGIN_OPSET)]
    return helper.make_model(graph, opset_imports=opsets)


def shapes_at(variant: Variant, sizes: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    """The shapes of the operands in elements, with ``sizes`` for the dynamic dims."""
    found = {}
    for arg in variant.spec.inputs:
        tensor = operands(variant)[arg.name]
        dims = zip(element_shape(tensor.shape, tensor.dtype), dynamic_dims(arg), strict=True)
        found[arg.name] = tuple(sizes[dynamic] if dynamic else size for size, dynamic in dims)
    return found


def profiles_of(variant: Variant) -> dict[str, Profile]:
    """Of both profiles of an engine, for the operands that have dynamic dims."""
    dynamic = [arg.name for arg in variant.spec.inputs if any(dynamic_dims(arg))]
    profiles = {}
    for name, dims in profile_dims(LIMITS).items():
        corners = [shapes_at(variant, {dim: extent[place] for dim, extent in dims.items()}) for place in range(3)]
        profiles[name] = {arg: ShapeRange(*(corner[arg] for corner in corners)) for arg in dynamic}
    return profiles


@dataclass
class Asked:
    """What TensorRT asked of a plugin while it built an engine, with the answers."""

    formats: list[tuple[int, tuple[Any, ...], bool]] = field(default_factory=list)
    """Position, types up to there, whether it is supported."""
    configured: list[tuple[list[Any], list[Any]]] = field(default_factory=list)
    """(min, opt, max) of each input and of each output, once a profile."""
    workspaces: list[tuple[list[Any], int]] = field(default_factory=list)
    """The largest shapes of the inputs, and bytes."""


@cache
def one_node_engine(variant: Variant) -> tuple[EngineBuild, Asked]:
    """An engine of the op alone, with both profiles."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        asked = record_questions(monkeypatch)
        trt = load_trt("tensorrt-rtx")
        return build_engine(trt, one_node_model(variant), profiles_of(variant), TARGET), asked


def record_questions(monkeypatch: pytest.MonkeyPatch) -> Asked:
    asked = Asked()
    supports, workspace = _OpPlugin.supports_format_combination, _OpPlugin.get_workspace_size
    configure = _OpPlugin.configure_plugin

    def supports_format_combination(self: Any, pos: int, in_out: Sequence[Any], num_inputs: int) -> bool:
        answer = supports(self, pos, in_out, num_inputs)
        asked.formats.append((pos, tuple(desc.desc.type for desc in in_out[: pos + 1]), answer))
        return answer

    def configure_plugin(self: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        asked.configured.append(([_ranges(desc) for desc in inputs], [_ranges(desc) for desc in outputs]))
        configure(self, inputs, outputs)

    def get_workspace_size(self: Any, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        answer = workspace(self, inputs, outputs)
        asked.workspaces.append(([tuple(desc.max) for desc in inputs], answer))
        return answer

    for method in (supports_format_combination, configure_plugin, get_workspace_size):
        monkeypatch.setattr(_OpPlugin, method.__name__, method)
    return asked


def _ranges(desc: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(desc.min), tuple(desc.opt), tuple(desc.max)
