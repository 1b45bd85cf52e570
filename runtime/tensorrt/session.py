"""An engine of a bundle in TensorRT: deserialized, with the execution contexts that run it."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.aligned_memory import aligned_empty
from qwen4exp_trt.runtime.checkpoint import listing
from qwen4exp_trt.runtime.load_options import CudaGraphs
from qwen4exp_trt.runtime.streams import Stream
from qwen4exp_trt.runtime.tensorrt.bindings import Bindings, bind
from qwen4exp_trt.runtime.tensorrt.capabilities import Capabilities
from qwen4exp_trt.runtime.tensorrt.jit_cache import JitCache
from qwen4exp_trt.runtime.tensorrt.log import make_log

logger = logging.getLogger(__name__)


class Session:
    """The engine in the file ``path``, deserialized by the module ``trt``; ``jit_cache`` keeps what it compiles.

    Its execution contexts share `activations`, since one of them runs at a time, and whatever they are bound to.
    """

    def __init__(
        self, trt: ModuleType, path: Path, device: torch.device, stream: Stream, graphs: CudaGraphs, jit_cache: JitCache
    ) -> None:
        self.trt, self.path, self.jit_cache = trt, path, jit_cache
        self.log = make_log(trt)
        self.capabilities = Capabilities(trt)
        self._stream, self._graphs = stream, graphs
        self._runtime: Any = trt.Runtime(self.log)
        start = time.perf_counter()
        self.engine: Any = self._deserialize()
        self.deserialize_seconds = time.perf_counter() - start
        self.context_seconds = 0.0
        """That contexts took to make, all of them together: with TensorRT for RTX much of it is compiling."""
        self.contexts: list[Context] = []
        self._configs: dict[bool, Any] = {}
        """By whether steps of a context are captured."""
        sizes = [
            self.engine.get_device_memory_size_for_profile_v2(index)
            for index in range(self.engine.num_optimization_profiles)
        ]
        self.activations = aligned_empty((max([*sizes, 1]),), torch.uint8, device)

    def make_context(self, profile: int, bindings: Bindings, is_captured: bool) -> Context:
        """A context for the optimization profile of that index, with every address bound that no step changes."""
        start = time.perf_counter()
        context = Context(self, self._create_context(is_captured), is_captured)
        with self._stream.fork():
            selected = context.handle.set_optimization_profile_async(profile, self._stream.handle)
        self._stream.join()
        self.check(selected, f"select the profile {profile}")
        context.handle.set_device_memory(self.activations.data_ptr(), self.activations.nbytes)
        refused = bind(context.handle, bindings.addresses, bindings.shapes)
        self.check(refused is None, str(refused))
        self.contexts.append(context)
        self.context_seconds += time.perf_counter() - start
        return context

    def drop(self, context: Context) -> None:
        """Let go of one that could not run."""
        context.handle = None
        self.contexts.remove(context)

    def use_activations(self, memory: Tensor) -> None:
        """Let all contexts, those to come as well, have ``memory``, which is no smaller than `activations`."""
        assert memory.nbytes >= self.activations.nbytes
        self.activations = memory
        for context in self.contexts:
            context.handle.set_device_memory(memory.data_ptr(), memory.nbytes)

    def check(self, succeeded: bool, what: str) -> None:
        """`BundleError` with what TensorRT logged, unless something ``succeeded``."""
        if not succeeded:
            raise BundleError(f"{self.path}: TensorRT could not {what}: {self.log.problems()}")

    def close(self) -> None:
        """Save what was compiled, and let go of TensorRT's objects, each before the one that made it."""
        for context in self.contexts:
            context.handle = None
        self.contexts.clear()
        self.jit_cache.close()
        self._configs.clear()
        self.engine = self._runtime = None

    def _deserialize(self) -> Any:
        data = self.path.read_bytes()  # without weights, so it is small
        is_valid, reasons = self.capabilities.engine_problems(self._runtime, data)
        if not is_valid:
            raise BundleError(
                f"{self.path}: TensorRT cannot run it here ({listing(reasons) or 'it says not why'}): "
                f"{self.log.problems()}; build the bundle again on this machine, or update its driver"
            )
        if reasons:
            logger.warning("%s: TensorRT runs it with reservations: %s", self.path, ", ".join(reasons))
        engine = self._runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise BundleError(f"{self.path}: TensorRT cannot load it: {self.log.problems()}")
        return engine

    def _create_context(self, is_captured: bool) -> Any:
        if is_captured not in self._configs:
            config = self.engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(self.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
            self.capabilities.choose_graphs(config, self._graphs)
            self.capabilities.choose_specialization(config, is_captured)
            if self.capabilities.compiles_at_run_time:
                self.jit_cache.attach(config)
            self._configs[is_captured] = config
        context = self.engine.create_execution_context(self._configs[is_captured])
        if context is None:
            raise BundleError(f"{self.path}: TensorRT cannot make an execution context: {self.log.problems()}")
        return context


class Context:
    """An execution context of a `Session`."""

    def __init__(self, session: Session, handle: Any, is_captured: bool) -> None:
        self.handle, self._session, self._is_captured = handle, session, is_captured
        self._has_run = False

    def enqueue(self, inputs: Mapping[str, Tensor]) -> None:
        """Enqueue a step, in a block of the session's stream."""
        session = self._session
        addresses = {name: tensor.data_ptr() for name, tensor in inputs.items()}
        refused = bind(self.handle, addresses, {name: tuple(tensor.shape) for name, tensor in inputs.items()})
        session.check(refused is None, str(refused))
        stream = session._stream.handle
        session.check(self.handle.execute_async_v3(stream), "execute a step")
        if self._is_captured and not self._has_run and not session.capabilities.is_capturable(self.handle, stream):
            shapes = {name: list(tensor.shape) for name, tensor in inputs.items()}
            raise BundleError(
                f"{session.path}: {session.trt.__name__} says that a step of the shapes {shapes} cannot be captured in "
                "a CUDA graph; load the bundle with cuda_graphs='none' (--cuda-graphs none)"
            )
        self._has_run = True
