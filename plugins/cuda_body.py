"""The CUDA body of every op: its launcher's plan, executed on torch's memory and stream."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, TypeVar

import torch
from torch import Tensor

from qwen4exp_trt.errors import PluginError
from qwen4exp_trt.plugins.execute import compute_capability, execute, num_multiprocessors
from qwen4exp_trt.plugins.kernels import MIN_CAPABILITY, MOST_PLANS, NUM_SEMAPHORES, Plan
from qwen4exp_trt.plugins.spec import OpSpec, element_shape

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class _Prepared:
    """What all calls with operands of the same shapes share."""

    plan: Plan
    outputs: tuple[tuple[str, list[int], torch.dtype], ...]


_plans: OrderedDict[Any, Plan] = OrderedDict()
_prepared: OrderedDict[Any, _Prepared] = OrderedDict()
"""By shapes, the last used last. Prompts have chunks of any length, each of which makes some."""
_lock = Lock()
"""Of both: models in several threads share them."""


def run_kernels(spec: OpSpec, args: Sequence[Any]) -> Tensor | tuple[Tensor, ...]:
    """One call of ``spec`` on CUDA tensors; states are updated in place. Can be captured in a CUDA graph."""
    tensors, attrs = spec.split_args(args)
    device = tensors[spec.inputs[0].name].device
    tensors = {arg.name: _checked(spec, arg.name, tensors[arg.name], device, arg.mutated) for arg in spec.inputs}
    operands = tensors.values()
    key = (spec.name, *((each.shape, each.dtype) for each in operands), *map(_hashable, attrs.values()), device.index)
    call = _kept(_prepared, key, lambda: _prepare(spec, tensors, attrs, device.index))
    outputs = {name: torch.empty(shape, dtype=dtype, device=device) for name, shape, dtype in call.outputs}
    scratch = torch.empty(call.plan.scratch_bytes, dtype=torch.uint8, device=device)
    pointers = {name: tensor.data_ptr() for name, tensor in (tensors | outputs).items()}
    stream = torch.cuda.current_stream(device).cuda_stream
    execute(call.plan, pointers, scratch.data_ptr(), semaphores(device.index).data_ptr(), device.index, stream)
    return next(iter(outputs.values())) if len(outputs) == 1 else tuple(outputs.values())


def _prepare(spec: OpSpec, tensors: Mapping[str, Tensor], attrs: Mapping[str, Any], device_index: int) -> _Prepared:
    """Check the operands and plan the call."""
    bound = spec.check_operands(tensors, attrs)
    elements = {name: element_shape(tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    dtypes = {name: tensor.dtype for name, tensor in tensors.items()}
    target = num_multiprocessors(device_index), compute_capability(device_index)
    plan = cached_plan(spec, elements, dtypes, attrs, *target)
    results = zip(
        spec.outputs, spec.output_shapes(bound), spec.output_dtypes(list(dtypes.values()), attrs), strict=True
    )
    return _Prepared(plan, tuple((arg.name, shape, dtype) for arg, shape, dtype in results))


def cached_plan(
    spec: OpSpec,
    shapes: Mapping[str, Sequence[int]],
    dtypes: Mapping[str, torch.dtype],
    attrs: Mapping[str, Any],
    num_sms: int,
    capability: tuple[int, int] = MIN_CAPABILITY,
) -> Plan:
    """`OpSpec.plan`, made once for equal arguments."""
    values = tuple(map(_hashable, attrs.values()))
    key = (spec.name, tuple(map(tuple, shapes.values())), tuple(dtypes.values()), values, num_sms, capability)
    return _kept(_plans, key, lambda: spec.plan(shapes, dtypes, attrs, num_sms, capability))


def _kept(cached: OrderedDict[Any, _Value], key: Any, make: Callable[[], _Value]) -> _Value:
    """What is cached for ``key``, made if it is not; of more than `MOST_PLANS` the one that was not used for longest
    is dropped."""
    with _lock:
        value = cached.get(key)
        if value is not None:
            cached.move_to_end(key)
            return value
    value = make()
    with _lock:
        cached[key] = value
        if len(cached) > MOST_PLANS:
            cached.popitem(last=False)
    return value


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@cache
def semaphores(device_index: int) -> Tensor:
    """The zeroed counters of a GPU, which all kernels share: they run one after another, and leave them zero.

    So a process must not run kernels on several streams of a GPU at once.
    """
    counters = torch.zeros(NUM_SEMAPHORES, dtype=torch.int32, device=f"cuda:{device_index}")
    torch.cuda.synchronize(device_index)  # TensorRT uses them on a stream of its own
    return counters


def _checked(spec: OpSpec, name: str, tensor: Tensor, device: torch.device, is_state: bool) -> Tensor:
    if tensor.device != device and not tensor.is_pinned():
        raise PluginError(f"{spec.qualified_name}: operand {name} is on {tensor.device}, expected {device}")
    if is_state and not tensor.is_contiguous():
        raise PluginError(f"{spec.qualified_name}: the state {name} is not contiguous")
    return tensor.contiguous()
