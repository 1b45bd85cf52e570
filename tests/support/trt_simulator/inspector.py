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
        return json.dumps({"Layers": [self._told(layer) for layer in layers], "Bindings": bindings})

    def get_layer_information(self, layer_index: int, format: Any) -> str:
        layer = self._layers["layers"][layer_index]
        return str(layer) if format == self._module.LayerInformationFormat.ONELINE else json.dumps(self._told(layer))

    def _told(self, layer: Mapping[str, Any]) -> dict[str, Any]:
        """By TensorRT's keys; in every profile but the first it marks the names."""
        profiles = list(dict.fromkeys(each["profile"] for each in self._layers["layers"]))
        index = profiles.index(layer["profile"])
        return {
            "Name": f"{layer['name']} [profile {index}]" if index else layer["name"],
            "LayerType": layer["type"],
            "Inputs": [_tensor(tensor) for tensor in layer["inputs"]],
            "Outputs": [_tensor(tensor) for tensor in layer["outputs"]],
            "TacticName": layer.get("tactic", ""),
            "Metadata": "".join(f"[ONNX Layer: {name}]" for name in layer["modules"]),
        }


def _tensor(tensor: Mapping[str, Any]) -> dict[str, Any]:
    return {"Name": tensor["name"], "Dimensions": tensor["dims"], "Datatype": tensor["dtype"]}
