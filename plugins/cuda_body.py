"""The CUDA body of every op: its launcher's plan, executed on torch's memory and stream."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.execute import execute, num_multiprocessors
from qwen4exp_trt.plugins.kernels import NUM_SEMAPHORES, Plan
from qwen4exp_trt.plugins.spec import OpSpec, element_shape

_plans: dict[Any, Plan] = {}


def run_kernels(spec: OpSpec, args: Sequence[Any]) -> Tensor | tuple[Tensor, ...]:
    """One call of ``spec`` on CUDA tensors; states are updated in place. Can be captured in a CUDA graph."""
    tensors, attrs = spec.split_args(args)
    device = tensors[spec.inputs[0].name].device
    tensors = {arg.name: _checked(spec, arg.name, tensors[arg.name], device, arg.mutated) for arg in spec.inputs}
    plan = _plan(spec, tensors, attrs, num_multiprocessors(device.index))
    dtypes = spec.output_dtypes([tensors[arg.name].dtype for arg in spec.inputs], attrs)
    shapes = spec.output_shapes(spec.bind_tensors(tensors, attrs))
    outputs = tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, dtypes, strict=True))
    scratch = torch.empty(plan.scratch_bytes, dtype=torch.uint8, device=device)
    pointers = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    pointers |= {arg.name: tensor.data_ptr() for arg, tensor in zip(spec.outputs, outputs, strict=True)}
    stream = torch.cuda.current_stream(device).cuda_stream
    execute(plan, pointers, scratch.data_ptr(), _semaphores(device).data_ptr(), device.index, stream)
    return outputs[0] if len(outputs) == 1 else outputs


def _checked(spec: OpSpec, name: str, tensor: Tensor, device: torch.device, is_state: bool) -> Tensor:
    if tensor.device != device and not tensor.is_pinned():
        raise PluginError(f"{spec.qualified_name}: operand {name} is on {tensor.device}, expected {device}")
    if is_state and not tensor.is_contiguous():
        raise PluginError(f"{spec.qualified_name}: the state {name} is not contiguous")
    return tensor.contiguous()


def _plan(spec: OpSpec, tensors: dict[str, Tensor], attrs: dict[str, Any], num_sms: int) -> Plan:
    shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors.values())
    values = tuple(tuple(value) if isinstance(value, list) else value for value in attrs.values())
    key = (spec.name, shapes, values, num_sms)
    if key not in _plans:
        spec.check_operands(tensors, attrs)
        elements = {name: element_shape(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
        _plans[key] = spec.plan(elements, {name: tensor.dtype for name, tensor in tensors.items()}, attrs, num_sms)
    return _plans[key]


@cache
def _semaphores(device: torch.device) -> Tensor:
    return torch.zeros(NUM_SEMAPHORES, dtype=torch.int32, device=device)
