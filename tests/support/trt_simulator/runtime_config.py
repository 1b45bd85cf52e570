"""How contexts are made, and the cache of kernels that TensorRT for RTX compiles when it first needs them."""

from __future__ import annotations

from typing import Any

import numpy as np

from trt_simulator.api import Double
from trt_simulator.errors import SimulatorError

_MAGIC = b"simulated runtime cache of "


class RuntimeCache(Double):
    stands_for = "IRuntimeCache"

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._kernels: set[str] = set()

    def deserialize(self, blob: Any) -> bool:
        """False for what another version, or nothing of ours, has written."""
        data = bytes(blob)
        if not data.startswith(self._header()):
            return False
        self._kernels |= set(data[len(self._header()) :].decode().splitlines())
        return True

    def serialize(self) -> np.ndarray:
        """As an ``IHostMemory``: a buffer with ``nbytes``."""
        return np.frombuffer(self._header() + "\n".join(sorted(self._kernels)).encode(), np.uint8)

    def reset(self) -> bool:
        self._kernels.clear()
        return True

    def _header(self) -> bytes:
        return _MAGIC + f"{self._module.__name__} {self._module.__version__}\n".encode()


class RuntimeConfig(Double):
    stands_for = "IRuntimeConfig"

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._strategy = module.ExecutionContextAllocationStrategy.STATIC
        self._cache: RuntimeCache | None = None
        self._graphs: Any = None
        self._specialization: Any = None

    def get_execution_context_allocation_strategy(self) -> Any:
        return self._strategy

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self._strategy = strategy

    def create_runtime_cache(self) -> RuntimeCache:
        return RuntimeCache(self._module)

    def get_runtime_cache(self) -> RuntimeCache | None:
        return self._cache

    def set_runtime_cache(self, cache: RuntimeCache) -> bool:
        if not isinstance(cache, RuntimeCache):
            raise SimulatorError(f"{cache!r} is no runtime cache")
        self._cache = cache
        return True

    @property
    def cuda_graph_strategy(self) -> Any:
        return self._module.CudaGraphStrategy.DISABLED if self._graphs is None else self._graphs

    @cuda_graph_strategy.setter
    def cuda_graph_strategy(self, strategy: Any) -> None:
        self._graphs = strategy

    @property
    def dynamic_shapes_kernel_specialization_strategy(self) -> Any:
        strategies = self._module.DynamicShapesKernelSpecializationStrategy
        return strategies.LAZY if self._specialization is None else self._specialization

    @dynamic_shapes_kernel_specialization_strategy.setter
    def dynamic_shapes_kernel_specialization_strategy(self, strategy: Any) -> None:
        self._specialization = strategy

    @property
    def _makes_graphs(self) -> bool:
        return self._graphs is not None and self._graphs != self._module.CudaGraphStrategy.DISABLED

    def _compiled(self, what: str) -> None:
        """Note what an execution has compiled."""
        if self._cache is not None:
            self._cache._kernels.add(what)
