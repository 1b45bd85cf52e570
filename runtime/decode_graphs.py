"""Decode steps as CUDA graphs: captured when a shape is first met, replayed with new inputs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.packed_inputs import InputLayout, StagedInputs, StepShape, captured_shape
from qwen4exp_trt.runtime.specs import TensorSpec

Execute = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Runs a step on inputs by name, all on the GPU, and returns its results there by name."""


Pool = Any
"""The memory of graphs of which one runs at a time, as `torch.cuda.graph_pool_handle` makes it."""


class _Staging:
    """Pinned memory for the inputs of a step. It is free again when its last copy has ended."""

    def __init__(self, layout: InputLayout) -> None:
        self._layout = layout
        self._staged = StagedInputs(layout, torch.empty(layout.num_bytes, dtype=torch.uint8, pin_memory=True))
        self._copied = torch.cuda.Event()

    def copy(self, inputs: Mapping[str, Tensor], target: Tensor) -> None:
        """Pack ``inputs`` into ``target`` on a GPU: what is on the CPU by one copy that nobody waits for."""
        self._copied.synchronize()
        num_bytes, elsewhere = self._staged.pack(inputs)
        if elsewhere:
            target[:num_bytes].copy_(self._staged.buffer[:num_bytes], non_blocking=True)
        else:
            target.copy_(self._staged.buffer, non_blocking=True)
        self._copied.record()
        for name in elsewhere:
            self._layout.copy_on_device(name, inputs[name], target)


@dataclass(frozen=True)
class _Captured:
    """A graph with the memory that it reads its inputs from and writes its results to."""

    inputs: Tensor
    graph: torch.cuda.CUDAGraph
    results: Mapping[str, Tensor]
    stagings: Iterator[_Staging]
    """In turns, so that a step need not wait for the one before."""


class DecodeGraphs:
    """The decode steps of one program on one GPU.

    A graph takes steps of up to its shape: its inputs are padded. All share the memory of ``pool``, so a result is only
    good until the next replay. ``specs`` are the inputs of a step.
    """

    def __init__(
        self, execute: Execute, specs: Sequence[TensorSpec], limits: EngineLimits, device: torch.device, pool: Pool
    ) -> None:
        self._execute, self._specs, self._limits, self._device = execute, specs, limits, device
        self._captured: dict[StepShape, _Captured] = {}
        self._pool = pool
        self._stream = torch.cuda.Stream(device)

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Enqueue a step on the current stream; None, and nothing is done, if it is not a decode step.

        ``inputs`` are on the CPU, or on the GPU where only their shape matters to the host. The results have the
        padded shape; the rows of the step come first. Nothing here waits for the GPU but the capture of a new shape.
        """
        shape = captured_shape(inputs, self._limits)
        if shape is None:
            return None
        if shape not in self._captured:
            self._captured[shape] = self._capture(shape)
        captured = self._captured[shape]
        next(captured.stagings).copy(inputs, captured.inputs)
        captured.graph.replay()
        return captured.results

    def _capture(self, shape: StepShape) -> _Captured:
        layout = InputLayout(self._specs, shape)
        buffer = layout.padding().to(self._device)
        views, graph = layout.views(buffer), torch.cuda.CUDAGraph()
        # What is loaded, allocated or chosen at a first call has to be there before the capture: one step of padding.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            self._execute(views)
        self._stream.synchronize()
        with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
            results = self._execute(views)
        stagings = [_Staging(layout) for _ in range(2)]
        return _Captured(buffer, graph, results, itertools.cycle(stagings))


def move_inputs(
    specs: Sequence[TensorSpec], inputs: Mapping[str, Tensor], device: torch.device
) -> Mapping[str, Tensor]:
    """``inputs`` on ``device``, as they are."""
    shape = StepShape.of(inputs)
    there = {spec.name: inputs[spec.name] for spec in specs if inputs[spec.name].device.type != "cpu"}
    layout = InputLayout([spec for spec in specs if spec.name not in there], shape)
    buffer = torch.empty(layout.num_bytes, dtype=torch.uint8, device=device)
    _Staging(layout).copy(inputs, buffer)
    return {**layout.views(buffer), **there}
