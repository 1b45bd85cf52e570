"""The engine of a part, from the bundle's ``layers.json``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qwen4exp_trt.builder.inspection.document import Engine, EngineLayer, EngineTensor
from qwen4exp_trt.builder.inspection.program_ops import ProgramOps
from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.json_files import read_json_object


def read_engine(path: Path, num_bytes: int, ops: ProgramOps) -> Engine:
    """The engine of ``num_bytes`` whose ``layers.json`` is ``path``; `BundleError` if that is damaged."""
    report = read_json_object(path, BundleError)
    try:
        return Engine(
            num_bytes=num_bytes,
            tensorrt=report["tensorrt"],
            target=report["target"],
            activation_bytes=dict(report["activation_bytes"]),
            scratch_bytes=dict(report["scratch_bytes"]),
            constant_bytes=report["constant_bytes"],
            layers=[_layer(layer, ops) for layer in report["layers"]],
            unread=list(report["unread"]),
        )
    except (KeyError, TypeError) as error:
        raise BundleError(f"{path}: not the layers of an engine ({error!r}); build the bundle again") from error


def layers_of_ops(layers: Sequence[EngineLayer]) -> Mapping[str, dict[str, list[int]]]:
    """Op -> profile -> the indices of the layers that compute it."""
    found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, layer in enumerate(layers):
        for path in layer.ops:
            found[path][layer.profile].append(index)
    return {path: dict(by_profile) for path, by_profile in found.items()}


def _layer(layer: Mapping[str, Any], ops: ProgramOps) -> EngineLayer:
    """An engine names ONNX nodes, of which an op may have several."""
    paths = [ops.find_path(name) for name in layer["modules"]]
    return EngineLayer(
        name=layer["name"],
        type=layer["type"],
        profile=layer["profile"],
        plugin=layer.get("plugin"),
        tactic=layer.get("tactic"),
        ops=list(dict.fromkeys(path for path in paths if path is not None)),
        inputs=[_tensor(tensor) for tensor in layer["inputs"]],
        outputs=[_tensor(tensor) for tensor in layer["outputs"]],
    )


def _tensor(tensor: Mapping[str, Any]) -> EngineTensor:
    return EngineTensor(name=tensor["name"], dtype=tensor["dtype"], dims=list(tensor["dims"]))
