"""The module: TensorRT's runtime for the engines of one bundle, and all else of the real module."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Collection
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import torch
from cpu_stream import CpuStream

from qwen4exp_trt.runtime.manifest import DRAFT_DIR, ENGINE_FILE, LAYERS_FILE, ONNX_FILE, Manifest
from trt_simulator import api
from trt_simulator.cuda_streams import CudaTarget
from trt_simulator.engine import Engine, EngineFile
from trt_simulator.errors import SimulatorError
from trt_simulator.memory import MEMORY
from trt_simulator.program import SimulatedProgram
from trt_simulator.registry import Registry
from trt_simulator.runtime_config import RuntimeConfig


class SimulatedTensorRT(ModuleType):
    """``real`` with a runtime for the engines of ``bundle`` alone.

    ``plugins``: what executes a node of our ops: the op's ``body`` for the device, or by ``enqueue`` the TensorRT
    plugin itself. ``lacks``: names that the module has not, such as those that only TensorRT for RTX has;
    ``Class.member`` for a member. ``calls`` counts the steps of each profile, those of the draft head's engine under
    ``mtp/`` and its name.
    """

    def __init__(
        self,
        real: ModuleType,
        bundle: Path,
        plugins: str = "body",
        lacks: Collection[str] = (),
        device: torch.device | None = None,
    ) -> None:
        super().__init__(real.__name__)
        assert plugins in ("body", "enqueue"), plugins
        self.real, self.bundle, self.plugins, self.lacks = real, bundle, plugins, frozenset(lacks)
        self.device = device or torch.device("cpu")
        self.manifest = manifest = Manifest.load(bundle)
        self.engine_files = [_engine_file(bundle, manifest.profiles, "")]
        if manifest.draft is not None:
            self.engine_files.append(_engine_file(bundle / DRAFT_DIR, manifest.draft.profiles, f"{DRAFT_DIR}/"))
        self.calls = {name: 0 for file in self.engine_files for name in file.profile_names}
        self.refusals: dict[str, str] = {}
        """Method (``IExecutionContext.execute_async_v3``) -> what TensorRT logs when it next refuses the call."""
        self.log: Any = None
        self.validity = (real.EngineValidity.VALID, 0) if hasattr(real, "EngineValidity") else None
        """What ``get_engine_validity`` says of a known engine: that, and its reasons."""
        self.is_capturable = True
        self.configs: list[RuntimeConfig] = []
        """All that were made."""
        self._registry = Registry(self)
        MEMORY.watch()

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("lacks", ()):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self.__dict__["real"], name)

    @property
    def run_node(self) -> Any:
        """Runs a node of the model's ONNX; to be replaced by a test that damages a kernel."""
        return self.program._run_node

    @run_node.setter
    def run_node(self, run: Any) -> None:
        self.program._run_node = run

    @property
    def program(self) -> SimulatedProgram:
        """The model's; that of the draft head is of the second of `engine_files`."""
        return self.engine_files[0].program

    # --- TensorRT's -------------------------------------------------------------------------------------------------

    def Runtime(self, logger: Any) -> Runtime:
        return Runtime(self, logger)

    def get_plugin_registry(self) -> Registry:
        return self._registry

    # --- of the doubles ---------------------------------------------------------------------------------------------

    def real_class(self, name: str) -> type | None:
        """Whose members a double has; None where there is no TensorRT to compare with."""
        return api.real_class(self.real, name)

    def call(self, what: str, method: Callable[..., Any]) -> Callable[..., Any]:
        """``method``, or what refuses the call if a test has asked for that."""
        message = self.refusals.pop(what, None)
        if message is None:
            return method

        def refuse(*args: Any, **kwargs: Any) -> Any:
            self.report(message)
            return None if what.split(".")[1].startswith(("create", "deserialize_cuda")) else False

        return refuse

    def report(self, message: str) -> None:
        self.log.log(self.real.ILogger.ERROR, message)

    def find_stream(self, handle: int) -> Any:
        """Where work for the stream of ``handle`` goes."""
        if self.device.type == "cuda":
            return CudaTarget(handle, self.device)
        stream = CpuStream.streams.get(handle)
        if stream is None:
            raise SimulatorError(f"there is no stream {handle:#x}")
        return stream


class Runtime(api.Double):
    stands_for = "Runtime"

    def __init__(self, module: SimulatedTensorRT, logger: Any) -> None:
        super().__init__(module)
        module.log = logger
        self._engines = weakref.WeakSet[Engine]()

    def deserialize_cuda_engine(self, serialized_engine: Any) -> Engine | None:
        file = self._file(serialized_engine)
        if file is None:
            self._module.report("not the serialized engine")
            return None
        self._module._registry._check_creators(file)
        return Engine(self._module, self, file)

    def get_engine_validity(self, buffer: Any) -> tuple[Any, int]:
        invalid = self._module.EngineValidity.INVALID, 0
        return invalid if self._file(buffer) is None else self._module.validity

    def get_plugin_registry(self) -> Registry:
        return self._module._registry

    def _file(self, data: Any) -> EngineFile | None:
        found = bytes(data)
        return next((file for file in self._module.engine_files if file.data == found), None)


def _engine_file(folder: Path, profiles: dict[str, Any], prefix: str) -> EngineFile:
    program = SimulatedProgram(onnx.load(folder / ONNX_FILE))
    layers = json.loads((folder / LAYERS_FILE).read_text(encoding="utf-8"))
    return EngineFile((folder / ENGINE_FILE).read_bytes(), program, profiles, prefix, layers)
