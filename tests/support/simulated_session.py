"""An engine used by hand over the simulator: every tensor bound, each call open to be done wrongly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_stream import CpuStream
from packed_steps import STEPS
from torch import Tensor
from trt_simulator import SimulatedTensorRT, SimulatorError

from qwen4exp_trt.builder.onnx_graph import TORCH_DTYPES
from qwen4exp_trt.plugins.spec import element_shape
from qwen4exp_trt.plugins.tensorrt import register_creators
from qwen4exp_trt.runtime.aligned_memory import aligned_empty
from qwen4exp_trt.runtime.tensorrt.log import make_log

POOLS = {"num_slots": 3, "num_blocks": 9}
MEMORY_BYTES = 1 << 16


def expect(message: str) -> Any:
    """A block that the simulator refuses with such a message."""
    return pytest.raises(SimulatorError, match=message)


class HandMadeSession:
    """One context of the profile ``decode``, ready to execute `STEPS[0]` on `stream`."""

    def __init__(self, trt: SimulatedTensorRT) -> None:
        register_creators(trt)
        self.trt, self.stream = trt, CpuStream()
        self.runtime: Any = trt.Runtime(make_log(trt))
        self.engine: Any = self.runtime.deserialize_cuda_engine(trt.engine_files[0].data)
        self.step = STEPS[0]
        graph = trt.program.graph
        self.inputs = [value.name for value in graph.input]
        dims = {name: list(tensor.shape) for name, tensor in self.step.items()}
        extents = {**POOLS, "T": dims["input_ids"][0], "L": dims["logits_indices"][0]}
        self.tensors: dict[str, Tensor] = {}
        aliases = trt.engine_files[0].aliases
        for value in (*graph.input, *graph.output):
            name = value.name
            if name in self.step:
                self.tensors[name] = aligned(self.step[name])
            elif name in aliases:
                self.tensors[name] = self.tensors[aliases[name]]
            else:
                tensor = value.type.tensor_type
                shape = [dim.dim_value or extents[dim.dim_param] for dim in tensor.shape.dim]
                self.tensors[name] = made = aligned_empty(shape, TORCH_DTYPES[tensor.elem_type]).zero_()
                if not tensor.shape.dim[0].dim_param:  # a weight
                    made.copy_(torch.rand(shape) / 10 if made.is_floating_point() else torch.ones(shape))
        self.memory = aligned_empty([MEMORY_BYTES], torch.uint8)
        self.context = self.make_context()

    def make_context(self, profile: int | None = 0, config: Any = None) -> Any:
        """``config``: of the engine's runtime, if the context is to have one."""
        strategy = self.trt.ExecutionContextAllocationStrategy.USER_MANAGED
        if config is not None:
            config.set_execution_context_allocation_strategy(strategy)
        context = self.engine.create_execution_context(config or strategy)
        if profile is not None:
            context.set_optimization_profile_async(profile, self.stream.handle)
            context.set_device_memory(self.memory.data_ptr(), self.memory.nbytes)
            self.bind(context)
        return context

    def bind(self, context: Any, **others: Tensor) -> None:
        """All tensors, ``others`` in place of those of this session."""
        for name, tensor in (self.tensors | others).items():
            if name in self.inputs and -1 in self.engine.get_tensor_shape(name):
                context.set_input_shape(name, tuple(element_shape(tensor.shape, tensor.dtype)))
            context.set_tensor_address(name, tensor.data_ptr())

    def enqueue(self, context: Any = None, stream: CpuStream | None = None) -> bool:
        return (context or self.context).execute_async_v3((stream or self.stream).handle)

    def execute(self) -> Tensor:
        """The logits of a step that was waited for."""
        with self.stream.fork():
            assert self.enqueue()
        self.stream.join()
        return self.tensors["logits"].clone()


def aligned(tensor: Tensor) -> Tensor:
    copy = aligned_empty(tensor.shape, tensor.dtype)
    return copy.copy_(tensor)
