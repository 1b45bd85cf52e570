"""Finds the op folders and registers each op with torch: schema, CPU body and a fake body derived from the spec."""

from __future__ import annotations

import pkgutil
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from qwen4exp_trt import plugins
from qwen4exp_trt.plugins.cuda_body import run_kernels
from qwen4exp_trt.plugins.spec import NAMESPACE, OpSpec

_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


@lru_cache(maxsize=1)
def all_specs() -> dict[str, OpSpec]:
    """Every op by name, registered with torch. A plugin folder without ``SPEC`` is an error."""
    specs: dict[str, OpSpec] = {}
    for module in pkgutil.iter_modules(plugins.__path__):
        if not module.ispkg:
            continue
        package = import_module(f"{plugins.__name__}.{module.name}")
        spec = package.SPEC
        assert spec.name == module.name, f"folder plugins/{module.name} holds the spec of {spec.name}"
        specs[spec.name] = spec
        _register(spec)
    return specs


def plugin_specs() -> dict[str, OpSpec]:
    """The ops by name that an engine calls as plugins."""
    return {name: spec for name, spec in all_specs().items() if not spec.is_native}


def op_versions() -> dict[str, int]:
    """The version of every op by name."""
    return {name: spec.version for name, spec in all_specs().items()}


def spec_of(op: Any) -> OpSpec | None:
    """The spec of a torch op overload, or None when it is not one of ours."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != NAMESPACE:
        return None
    return all_specs()[op._schema.name.removeprefix(f"{NAMESPACE}::")]


def _register(spec: OpSpec) -> None:
    spec.validate()
    _LIBRARY.define(spec.schema)

    def run_on_cpu(*args: Any) -> Any:
        tensors, attrs = spec.split_args(args)
        spec.check_operands(tensors, attrs)
        return spec.body(*args)

    def run_on_cuda(*args: Any) -> Any:
        return run_kernels(spec, args)

    def run_fake(*args: Any) -> Any:
        tensors, attrs = spec.split_args(args)
        return _fake_outputs(spec, tensors, attrs)

    _LIBRARY.impl(spec.name, run_on_cpu, "CPU")
    _LIBRARY.impl(spec.name, run_on_cuda, "CUDA")
    torch.library.register_fake(spec.qualified_name, run_fake, lib=_LIBRARY)


def _fake_outputs(spec: OpSpec, tensors: dict[str, Tensor], attrs: dict[str, Any]) -> Tensor | tuple[Tensor, ...]:
    bound = spec.bind_tensors(tensors, attrs)
    dtypes = spec.output_dtypes([tensors[arg.name].dtype for arg in spec.inputs], attrs)
    device = tensors[spec.inputs[0].name].device
    outputs = tuple(
        torch.empty(shape, dtype=dtype, device=device)
        for dtype, shape in zip(dtypes, spec.output_shapes(bound), strict=True)
    )
    return outputs[0] if len(outputs) == 1 else outputs
