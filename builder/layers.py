"""Reads the layer report that TensorRT logs at the end of a build: the only layer information without a GPU."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

REPORT_START = "Layers:\n"
"""How the log message with the report begins."""

_IO_HEADER = "I/O Tensors:"
_TENSORS = r"\[(?:,? \{[^{}]*\})*\]"
_LAYER = re.compile(
    rf"Name: (?P<name>.*?), LayerType: (?P<type>\w+), Inputs: (?P<inputs>{_TENSORS}), "
    rf"(?:Constants: {_TENSORS}, )?Outputs: (?P<outputs>{_TENSORS}), (?P<rest>.*)"
)
_DIMS = r"Dimensions: \[(?P<dims>[-\d,]*)\]"
_TENSOR = re.compile(rf"\{{ Name: (?P<name>.*?), (?:Location: \w+, )?{_DIMS}.*?Datatype: (?P<dtype>\w+)")
_IO_TENSOR = re.compile(rf" Name: (?P<name>.*?), IOMode: (?P<mode>\w+), DataType: (?P<dtype>\w+), {_DIMS}")
_PROFILE_MARK = re.compile(r" \[profile (\d+)\]")
_FUSED_GROUP = re.compile(r"_(myl\d+)_\d+$")
_MODULE = re.compile(r"\[ONNX Layer: ([^\]]*)\]")
_PLUGIN = re.compile(r"PluginType: (\w+)")
_TACTIC = re.compile(r"Tactic(?:Name|Value): ([^,]*)")
_ACTIVATION_MEMORY = re.compile(r"Total Activation Memory: (\d+) bytes")
_SCRATCH_MEMORY = re.compile(r"Max Scratch Memory: (\d+) bytes")
_CONSTANTS = re.compile(r"Total Weights Memory: (\d+) bytes")


def layer_report(log: Sequence[str], profile_names: Sequence[str]) -> dict[str, Any]:
    """The content of ``layers.json`` from the messages of a build's log.

    ``layers``: name, type, profile, inputs and outputs (name, dtype, dims with -1 for a dynamic one), tactic, plugin
    and ``modules``, the ONNX nodes that the layer computes. ``io_tensors``: the engine's inputs and outputs.
    ``activation_bytes``: by profile; ``scratch_bytes``: what of them the most demanding layer needs beside its
    operands. ``constant_bytes``: of constants in the engine, None if TensorRT did not tell. ``unread``: lines of the
    report in a form that this reader does not know.
    """
    report = next((message for message in reversed(log) if message.startswith(REPORT_START)), REPORT_START)
    layer_text, _, io_text = report.removeprefix(REPORT_START).partition(_IO_HEADER)
    lines = [line for line in layer_text.splitlines() if line]
    matches = [_LAYER.fullmatch(line) for line in lines]
    read = [match for match in matches if match]
    layers = [_layer(match) for match in read]
    for layer, index in zip(layers, _profile_indices(read), strict=True):
        layer["profile"] = profile_names[index]

    def sizes(pattern: re.Pattern[str]) -> list[int]:
        return [int(size) for message in log for size in pattern.findall(message)]

    return {
        "activation_bytes": dict(zip(profile_names, sizes(_ACTIVATION_MEMORY), strict=False)),
        "scratch_bytes": dict(zip(profile_names, sizes(_SCRATCH_MEMORY), strict=False)),
        "constant_bytes": next(iter(sizes(_CONSTANTS)), None),
        "io_tensors": [_tensor(match) | {"mode": match["mode"].lower()} for match in _IO_TENSOR.finditer(io_text)],
        "layers": layers,
        "unread": [line for line, match in zip(lines, matches, strict=True) if not match],
    }


def split_profile_mark(name: str) -> tuple[str, int]:
    """A layer's name without the mark of its profile, and the index that this says: 0 without a mark."""
    mark = _PROFILE_MARK.search(name)
    return _PROFILE_MARK.sub("", name), int(mark[1]) if mark else 0


def _layer(match: re.Match[str]) -> dict[str, Any]:
    layer: dict[str, Any] = {
        "name": split_profile_mark(match["name"])[0],
        "type": match["type"],
        "inputs": [_tensor(tensor) for tensor in _TENSOR.finditer(match["inputs"])],
        "outputs": [_tensor(tensor) for tensor in _TENSOR.finditer(match["outputs"])],
        "modules": _MODULE.findall(match["rest"]),
    }
    for key, pattern in (("tactic", _TACTIC), ("plugin", _PLUGIN)):
        found = pattern.search(match["rest"])
        if found and found[1]:
            layer[key] = found[1]
    return layer


def _tensor(match: re.Match[str]) -> dict[str, Any]:
    dims = [int(dim) for dim in match["dims"].split(",") if dim]
    return {"name": split_profile_mark(match["name"])[0], "dtype": match["dtype"], "dims": dims}


def _profile_indices(layers: Sequence[re.Match[str]]) -> list[int]:
    """The profile of each layer. Names carry a mark in every profile but the first; in a group of fused layers only
    those that touch the group's border do."""
    fused = [_FUSED_GROUP.search(match["name"]) for match in layers]
    groups = [group[1] if group else match[0] for group, match in zip(fused, layers, strict=True)]
    profiles: dict[str, int] = defaultdict(int)
    for group, match in zip(groups, layers, strict=True):
        profiles[group] = max([profiles[group], *map(int, _PROFILE_MARK.findall(match[0]))])
    return [profiles[group] for group in groups]
