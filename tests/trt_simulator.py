"""TensorRT's runtime on a CPU: a module that executes the ONNX that an engine was built from.

It is strict where TensorRT is, and where it is only silently wrong: every tensor must be bound, every shape inside the
selected profile, an updated state bound to the address of the state, device memory given.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor

from qwen4exp_trt.builder.interpret import OnnxProgram
from qwen4exp_trt.builder.onnx_graph import TORCH_DTYPES
from qwen4exp_trt.plugins.registry import plugin_specs
from qwen4exp_trt.plugins.spec import element_shape
from qwen4exp_trt.plugins.tensorrt import torch_dtypes
from qwen4exp_trt.runtime.manifest import DRAFT_DIR, ENGINE_FILE, ONNX_FILE, Manifest

DEVICE_MEMORY = 4096


class SimulatedTensorRT(ModuleType):
    """``real`` with a runtime for the engines of ``bundle`` alone. ``calls`` counts the steps of each profile, those of
    the draft head's engine under ``mtp/`` and its name."""

    def __init__(self, real: ModuleType, bundle: Path) -> None:
        super().__init__(real.__name__)
        self.real, self.bundle, self.manifest = real, bundle, Manifest.load(bundle)
        self.validity, self.invalidity = real.EngineValidity.VALID, 0
        self.is_capturable, self.configs = True, list[_Config]()
        self.calls = dict.fromkeys(self.manifest.profiles, 0)
        self.engine_bytes = (bundle / ENGINE_FILE).read_bytes()
        self.program = OnnxProgram(onnx.load(bundle / ONNX_FILE))
        self.draft: tuple[bytes, OnnxProgram] | None = None
        if self.manifest.draft is not None:
            part = bundle / DRAFT_DIR
            self.draft = (part / ENGINE_FILE).read_bytes(), OnnxProgram(onnx.load(part / ONNX_FILE))
            self.calls |= {f"{DRAFT_DIR}/{name}": 0 for name in self.manifest.draft.profiles}
        self.creators = {(s.onnx_op_type, str(s.version)): s for s in plugin_specs().values()}
        self.ExecutionContextAllocationStrategy = SimpleNamespace(USER_MANAGED="user managed")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    @property
    def run_node(self) -> Any:
        """Runs a node of the ONNX; to be replaced by a test that damages a kernel."""
        return self.program._run_node

    @run_node.setter
    def run_node(self, run: Any) -> None:
        self.program._run_node = run

    def get_plugin_registry(self) -> Any:
        return SimpleNamespace(
            register_creator=lambda creator, namespace: True,
            get_creator=lambda name, version, namespace: self.creators.get((name, version)),
        )

    def Runtime(self, log: Any) -> Any:
        return SimpleNamespace(
            deserialize_cuda_engine=lambda data: self._deserialize(bytes(data), log),
            get_engine_validity=lambda data: (self.validity, self.invalidity),
        )

    def _deserialize(self, data: bytes, log: Any) -> Any:
        if self.draft is not None and self.manifest.draft is not None and data == self.draft[0]:
            return _Engine(self, self.draft[1], self.manifest.draft.profiles, f"{DRAFT_DIR}/")
        if data != self.engine_bytes:
            log.log(self.real.ILogger.ERROR, "not the serialized engine")
            return None
        return _Engine(self, self.program, self.manifest.profiles)


class _Engine:
    def __init__(
        self, trt: SimulatedTensorRT, program: OnnxProgram, profiles: dict[str, Any], prefix: str = ""
    ) -> None:
        self.trt, self.program, graph = trt, program, program.graph
        self.profile_names = [f"{prefix}{name}" for name in profiles]
        self.inputs = {value.name: value for value in graph.input}
        self.outputs = {value.name: value for value in graph.output}
        self.tensors = {**self.inputs, **self.outputs}
        self.num_io_tensors = len(self.tensors)
        self.profiles = list(profiles.values())

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_tensor_mode(self, name: str) -> Any:
        return self.trt.TensorIOMode.INPUT if name in self.inputs else self.trt.TensorIOMode.OUTPUT

    def dtype(self, name: str) -> torch.dtype:
        return TORCH_DTYPES[self.tensors[name].type.tensor_type.elem_type]

    def get_tensor_dtype(self, name: str) -> Any:
        return next(trt for trt, dtype in torch_dtypes(self.trt.real).items() if dtype == self.dtype(name))

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        dims = self.tensors[name].type.tensor_type.shape.dim
        return tuple(dim.dim_value if dim.HasField("dim_value") else -1 for dim in dims)

    def get_device_memory_size_for_profile_v2(self, index: int) -> int:
        return DEVICE_MEMORY * (index + 1)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    def create_runtime_config(self) -> Any:
        config = _Config()
        self.trt.configs.append(config)
        return config

    def create_execution_context(self, config: Any) -> Any:
        assert config.strategy == "user managed"
        return _Context(self, config)


class _Config:
    cuda_graph_strategy: Any = None
    dynamic_shapes_kernel_specialization_strategy: Any = None
    strategy: Any = None
    cache: Any = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> Any:
        return _Cache()

    def set_runtime_cache(self, cache: Any) -> bool:
        self.cache = cache
        return True


class _Cache:
    """Has an entry for each set of shapes that was executed."""

    def __init__(self) -> None:
        self.entries: set[str] = set()

    def deserialize(self, data: bytes) -> bool:
        first, *lines = data.decode(errors="replace").splitlines()
        if first != "cache":
            return False
        self.entries |= set(lines)
        return True

    def serialize(self) -> Any:
        return np.frombuffer("\n".join(["cache", *sorted(self.entries)]).encode(), np.uint8)


class _Context:
    def __init__(self, engine: _Engine, config: _Config) -> None:
        self.engine, self.config = engine, config
        self.profile: int | None = None
        self.has_memory = False
        self.addresses: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}

    def is_stream_capturable(self, stream: int) -> bool:
        return self.engine.trt.is_capturable

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        self.profile = index
        return 0 <= index < len(self.engine.profiles)

    def set_device_memory(self, address: int, size: int) -> None:
        assert address % 256 == 0 or size
        self.has_memory = size >= self.engine.get_device_memory_size_for_profile_v2(self.profile or 0)

    def set_tensor_address(self, name: str, address: int) -> bool:
        self.addresses[name] = address
        return name in self.engine.tensors and address != 0

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        assert self.profile is not None, "no profile is selected"
        static = self.engine.get_tensor_shape(name)
        low, _, high = self.engine.profiles[self.profile].get(name, [static] * 3)
        is_within = len(shape) == len(low) and all(a <= n <= b for a, n, b in zip(low, shape, high, strict=True))
        self.shapes[name] = shape
        return is_within

    def execute_async_v3(self, stream: int) -> bool:
        engine = self.engine
        unbound = engine.tensors.keys() - self.addresses.keys()
        dynamic = {name for name in engine.inputs if -1 in engine.get_tensor_shape(name)}
        if unbound or dynamic - self.shapes.keys() or not self.has_memory or self.profile is None:
            return False
        operands = {name: self._tensor(name, self.shapes.get(name)) for name in engine.inputs}
        for name, result in engine.program.run(operands).items():
            source = next((i for i, operand in operands.items() if operand is result), None)
            if source is None:
                self._tensor(name, tuple(result.shape)).copy_(result)
            elif self.addresses[name] != self.addresses[source]:
                return False  # an updated state that is not bound where the state is
        if self.config.cache is not None:
            self.config.cache.entries.add(str(sorted(self.shapes.items())))
        engine.trt.calls[engine.profile_names[self.profile]] += 1
        return True

    def _tensor(self, name: str, shape: tuple[int, ...] | None) -> Tensor:
        """The memory that is bound, as a tensor."""
        dtype = self.engine.dtype(name)
        elements = shape or self.engine.get_tensor_shape(name)
        torch_shape = [*elements[:-1], elements[-1] // 2] if dtype == torch.float4_e2m1fn_x2 else list(elements)
        assert element_shape(torch_shape, dtype) == list(elements)
        size = math.prod(torch_shape) * dtype.itemsize
        if size == 0:
            return torch.empty(torch_shape, dtype=dtype)
        memory = (ctypes.c_uint8 * size).from_address(self.addresses[name])
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(torch_shape)
