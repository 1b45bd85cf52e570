"""The registry of plugin creators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qwen4exp_trt.plugins.spec import NAMESPACE
from trt_simulator.api import Double
from trt_simulator.errors import SimulatorError

if TYPE_CHECKING:
    from trt_simulator.engine import EngineFile


class Registry(Double):
    stands_for = "IPluginRegistry"

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._creators: dict[tuple[str, str, str], Any] = {}

    def register_creator(self, creator: Any, plugin_namespace: str = "") -> bool:
        key = creator.name, creator.plugin_version, plugin_namespace
        if key in self._creators:
            return False
        self._creators[key] = creator
        return True

    def get_creator(self, type: str, version: str, plugin_namespace: str = "") -> Any:
        return self._creators.get((type, version, plugin_namespace))

    @property
    def all_creators(self) -> list[Any]:
        return list(self._creators.values())

    def _check_creators(self, file: EngineFile) -> None:
        """`SimulatorError` unless there is one for every plugin of the engine."""
        specs = {spec.onnx_op_type: spec for node in file.program.graph.node if (spec := file.program.plugin_of(node))}
        absent = [name for name, spec in specs.items() if self._find(name, str(spec.version)) is None]
        if absent:
            raise SimulatorError(
                f"the engine is deserialized before the creators of {', '.join(absent)} are registered"
            )

    def _find(self, name: str, version: str) -> Any:
        return self._creators.get((name, version, NAMESPACE))
