"""An engine: the ONNX that it was built from, with the profiles that it was built for."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import onnx

from qwen4exp_trt.builder.onnx_graph import TORCH_DTYPES
from qwen4exp_trt.plugins.tensorrt import torch_dtypes
from trt_simulator.api import Double
from trt_simulator.context import Context
from trt_simulator.errors import SimulatorError
from trt_simulator.inspector import Inspector
from trt_simulator.plugins import Plugins
from trt_simulator.program import SimulatedProgram
from trt_simulator.runtime_config import RuntimeConfig

DEVICE_MEMORY = 4096
"""Activation memory of the first profile; each further one needs as much more."""


class EngineFile:
    """What is known of an engine's file: its program, its profiles by name, and its report of layers."""

    def __init__(
        self,
        data: bytes,
        program: SimulatedProgram,
        profiles: Mapping[str, Any],
        prefix: str,
        layers: Mapping[str, Any],
    ) -> None:
        self.data, self.program, self.layers = data, program, layers
        self.profile_names = [f"{prefix}{name}" for name in profiles]
        self.profiles = list(profiles.values())
        graph = program.graph
        self.inputs = {value.name: value for value in graph.input}
        self.outputs = {value.name: value for value in graph.output}
        self.tensors = {**self.inputs, **self.outputs}
        self.dtypes = {name: TORCH_DTYPES[value.type.tensor_type.elem_type] for name, value in self.tensors.items()}
        self.dims = {name: _dims(value) for name, value in self.tensors.items()}
        self.aliases = program.aliases()
        """Output -> the input that it is."""

    def shape_range(self, profile: int, name: str) -> tuple[list[int], list[int], list[int]]:
        static = [dim if isinstance(dim, int) else -1 for dim in self.dims[name]]
        return tuple(self.profiles[profile].get(name, [static] * 3))  # type: ignore[return-value]


def _dims(value: onnx.ValueInfoProto) -> list[int | str]:
    return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in value.type.tensor_type.shape.dim]


class Engine(Double):
    stands_for = "ICudaEngine"

    def __init__(self, module: Any, runtime: Any, file: EngineFile) -> None:
        super().__init__(module)
        self._runtime, self._file = weakref.ref(runtime), file
        self._plugins = Plugins(module, file) if module.plugins == "enqueue" else None

    def _check_alive(self) -> None:
        if self._runtime() is None:
            raise SimulatorError("use after free: the runtime of this engine was deleted")

    def _known(self, name: str) -> str:
        self._check_alive()
        if name not in self._file.tensors:
            raise SimulatorError(f"the engine has no tensor {name!r}")
        return name

    @property
    def num_io_tensors(self) -> int:
        self._check_alive()
        return len(self._file.tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self._file.profiles)

    @property
    def num_layers(self) -> int:
        return len(self._file.layers.get("layers", ()))

    @property
    def device_memory_size_v2(self) -> int:
        return max(map(self.get_device_memory_size_for_profile_v2, range(len(self._file.profiles))))

    def get_tensor_name(self, index: int) -> str:
        self._check_alive()
        names = list(self._file.tensors)
        if not 0 <= index < len(names):
            raise SimulatorError(f"the engine has {len(names)} tensors, none with the index {index}")
        return names[index]

    def get_tensor_mode(self, name: str) -> Any:
        modes = self._module.TensorIOMode
        return modes.INPUT if self._known(name) in self._file.inputs else modes.OUTPUT

    def get_tensor_dtype(self, name: str) -> Any:
        dtypes = {dtype: found for found, dtype in torch_dtypes(self._module.real).items()}
        return dtypes[self._file.dtypes[self._known(name)]]

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        return tuple(dim if isinstance(dim, int) else -1 for dim in self._file.dims[self._known(name)])

    def get_tensor_location(self, name: str) -> Any:
        self._known(name)
        return self._module.TensorLocation.DEVICE

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[tuple[int, ...]]:
        self._known_profile(profile_index)
        return [tuple(shape) for shape in self._file.shape_range(profile_index, self._known(name))]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self._file.aliases.get(self._known(name))

    def get_device_memory_size_for_profile_v2(self, profile_index: int) -> int:
        self._known_profile(profile_index)
        return DEVICE_MEMORY * (profile_index + 1)

    def _known_profile(self, index: int) -> int:
        self._check_alive()
        if not 0 <= index < len(self._file.profiles):
            raise SimulatorError(f"the engine has {len(self._file.profiles)} profiles, none with the index {index}")
        return index

    def create_runtime_config(self) -> RuntimeConfig:
        self._check_alive()
        config = RuntimeConfig(self._module)
        self._module.configs.append(config)
        return config

    def create_execution_context(self, strategy: Any = None, runtime_config: Any = None) -> Context:
        """By a strategy or by a config, as the overloads of the bindings have it."""
        self._check_alive()
        if isinstance(strategy, RuntimeConfig):
            strategy, runtime_config = None, strategy
        if runtime_config is not None:
            strategy = runtime_config._strategy
        if strategy != self._module.ExecutionContextAllocationStrategy.USER_MANAGED:
            raise SimulatorError(f"simulated contexts are given their device memory: not the strategy {strategy}")
        return Context(self._module, self, runtime_config or RuntimeConfig(self._module))

    def create_engine_inspector(self) -> Inspector:
        self._check_alive()
        return Inspector(self._module, self._file.layers)
