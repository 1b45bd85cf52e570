"""The engine inspector: what the build reported of the layers, in the form that an engine tells it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trt_simulator.api import Double


class Inspector(Double):
    stands_for = "EngineInspector"

    def __init__(self, module: Any, layers: Mapping[str, Any]) -> None:
        super().__init__(module)
        self._layers = layers
        self._context: Any = None

    @property
    def execution_context(self) -> Any:
        return self._context

    @execution_context.setter
    def execution_context(self, context: Any) -> None:
        self._context = context

    def get_engine_information(self, format: Any) -> str:
        layers = self._layers.get("layers", [])
        if format == self._module.LayerInformationFormat.ONELINE:
            return "\n".join(str(layer) for layer in layers)
        bindings = [tensor["name"] for tensor in self._layers.get("io_tensors", [])]
        return json.dumps({"Layers": layers, "Bindings": bindings})

    def get_layer_information(self, layer_index: int, format: Any) -> str:
        layer = self._layers["layers"][layer_index]
        return str(layer) if format == self._module.LayerInformationFormat.ONELINE else json.dumps(layer)
