"""An execution context: what is bound, and whether that may be executed."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trt_simulator.api import Double
from trt_simulator.errors import SimulatorError
from trt_simulator.execution import Execution, check_disjoint
from trt_simulator.memory import MEMORY, RAW, Region, Seen, num_bytes
from trt_simulator.plugins import PluginFailure
from trt_simulator.runtime_config import RuntimeConfig

if TYPE_CHECKING:
    from trt_simulator.engine import Engine


class Context(Double):
    stands_for = "IExecutionContext"

    def __init__(self, module: Any, engine: Engine, config: RuntimeConfig) -> None:
        super().__init__(module)
        self._engine_ref, self._file, self._config = weakref.ref(engine), engine._file, config
        self._profile: int | None = None
        self._device_memory: Region | None = None
        self._bound: dict[str, tuple[int, Seen]] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._executed_shapes: set[Any] = set()
        self._plugins = None if engine._plugins is None else engine._plugins.attach_to_context()

    def _engine(self) -> Engine:
        engine = self._engine_ref()
        if engine is None:
            raise SimulatorError("use after free: the engine of this context was deleted")
        engine._check_alive()
        return engine

    def _known(self, name: str) -> str:
        self._engine()
        if name not in self._file.tensors:
            raise SimulatorError(f"the engine has no tensor {name!r}")
        return name

    def _selected(self, what: str) -> int:
        if self._profile is None:
            raise SimulatorError(f"wrong order: {what} before a profile is selected")
        return self._profile

    @property
    def engine(self) -> Engine:
        return self._engine()

    @property
    def active_optimization_profile(self) -> int:
        return -1 if self._profile is None else self._profile

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        """Shapes have to be set again. Several contexts may have the same profile."""
        self._engine()._known_profile(profile_index)
        self._module.find_stream(stream_handle)
        if self._profile != profile_index:
            self._shapes.clear()
        self._profile = profile_index
        return True

    def set_device_memory(self, memory: int, size: int) -> None:
        profile = self._selected("device memory")
        needed = self._engine().get_device_memory_size_for_profile_v2(profile)
        if size < needed:
            raise SimulatorError(f"the device memory has {size} bytes, the profile needs {needed}")
        if memory == 0:
            raise SimulatorError("the device memory is at the address 0")
        self._device_memory = MEMORY.region("the device memory", memory, size)

    def set_input_shape(self, name: str, shape: Sequence[int]) -> bool:
        if self._known(name) not in self._file.inputs:
            raise SimulatorError(f"{name} is an output: its shape cannot be set")
        profile = self._selected(f"the shape of {name}")
        low, _, high = self._file.shape_range(profile, name)
        found, static = tuple(shape), self._engine().get_tensor_shape(name)
        if len(found) != len(static):
            raise SimulatorError(f"wrong rank: {name} {list(found)} has {len(found)} dims, the engine's {len(static)}")
        if not all(a <= n <= b for a, n, b in zip(low, found, high, strict=True)):
            where = self._file.profile_names[profile]
            raise SimulatorError(f"{name} {list(found)} is outside the profile {where}: {list(low)} to {list(high)}")
        self._shapes[name] = found
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if memory == 0:
            raise SimulatorError(f"{self._known(name)} is bound to the address 0")
        region = MEMORY.region(self._known(name), memory, 1)
        self._bound[name] = memory, region.seen
        dtype, expected = region.seen.dtype, self._file.dtypes[name]
        if dtype not in (RAW, expected):
            raise SimulatorError(f"wrong dtype: {name} is {expected} in the engine, {dtype} in memory")
        return True

    def get_tensor_address(self, name: str) -> int:
        self._known(name)
        return self._bound[name][0] if name in self._bound else 0

    def get_tensor_shape(self, name: str) -> tuple[int, ...]:
        if self._known(name) in self._file.inputs:
            return self._shapes.get(name, self._engine().get_tensor_shape(name))
        extents = self._extents()
        return tuple(extents.get(dim, -1) if isinstance(dim, str) else dim for dim in self._file.dims[name])

    def infer_shapes(self) -> list[str]:
        self._selected("infer_shapes")
        return self._without_shape()

    def is_stream_capturable(self, stream: int) -> bool:
        self._module.find_stream(stream)
        return self._module.is_capturable and not self._config._makes_graphs

    def get_runtime_config(self) -> RuntimeConfig:
        return self._config

    def execute_async_v3(self, stream_handle: int) -> bool:
        execution = self._execution()
        stream = self._module.find_stream(stream_handle)
        if stream.is_capturing and self._config._makes_graphs:
            raise SimulatorError(f"captured, while TensorRT makes the CUDA graphs of {execution.name}")
        if stream.is_capturing and execution.shapes_key not in self._executed_shapes:
            raise SimulatorError(f"captured before {execution.name} was executed once with these shapes")
        try:
            stream.enqueue(execution)
        except PluginFailure as failure:
            self._module.report(str(failure))
            return False
        self._executed_shapes.add(execution.shapes_key)
        return True

    def _execution(self) -> Execution:
        """What is bound now, checked."""
        profile = self._selected("execute_async_v3")
        engine = self._engine()
        if missing := self._without_shape():
            raise SimulatorError(f"no shape is set of {', '.join(missing)}")
        if unbound := [name for name in self._file.tensors if name not in self._bound]:
            raise SimulatorError(f"without address: {', '.join(unbound)}")
        if self._device_memory is None:
            raise SimulatorError("no device memory is given")
        if self._device_memory.num_bytes < engine.get_device_memory_size_for_profile_v2(profile):
            raise SimulatorError("the device memory is smaller than the selected profile needs")
        self._device_memory.check_alive()
        extents = self._extents()
        shapes = {
            name: tuple(extents[dim] if isinstance(dim, str) else dim for dim in dims)
            for name, dims in self._file.dims.items()
        }
        regions = {name: self._region(name, shape) for name, shape in shapes.items()}
        for name, source in self._file.aliases.items():
            if regions[name].address != regions[source].address:
                raise SimulatorError(f"missing alias: {name} is not bound where {source} is")
        check_disjoint(self._file, regions, self._device_memory)
        return Execution(self, self._module, self._file, profile, shapes, regions, self._device_memory, self._plugins)

    def _region(self, name: str, shape: tuple[int, ...]) -> Region:
        """The memory of a tensor, which holds it if the tensor that was bound has its rows."""
        address, seen = self._bound[name]
        dtype = self._file.dtypes[name]
        region = Region(name, address, num_bytes(dtype, shape), seen)
        region.check_alive()
        MEMORY.region(name, address, region.num_bytes)
        if seen.dtype != RAW:
            _check_layout(name, shape, seen)
        return region

    def _without_shape(self) -> list[str]:
        return [
            name
            for name in self._file.inputs
            if name not in self._shapes and any(isinstance(dim, str) for dim in self._file.dims[name])
        ]

    def _extents(self) -> dict[str, int]:
        """Of the named dims; `SimulatorError` if two inputs have them differently."""
        extents: dict[str, int] = {}
        for name, shape in self._shapes.items():
            for dim, extent in zip(self._file.dims[name], shape, strict=True):
                if isinstance(dim, str) and extents.setdefault(dim, extent) != extent:
                    raise SimulatorError(f"{name} {list(shape)}: {dim} is {extents[dim]} in other inputs")
        return extents


def _check_layout(name: str, shape: tuple[int, ...], seen: Seen) -> None:
    found = list(seen.shape)
    if not seen.is_contiguous:
        raise SimulatorError(f"{name} is bound to a tensor {found} that is not contiguous")
    if len(found) != len(shape):
        raise SimulatorError(f"wrong rank: {name} is {list(shape)}, the tensor bound to it {found}")
    if shape and (found[1:] != list(shape[1:]) or found[0] < shape[0]):
        raise SimulatorError(f"wrong shape: {name} is {list(shape)}, the tensor bound to it {found}")
