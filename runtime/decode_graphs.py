"""Decode steps of few shapes, as CUDA graphs: captured when a shape is first met, replayed with new inputs."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from qwen4exp_trt.runtime.aligned_memory import aligned_empty
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.packed_inputs import InputLayout, StagedInputs, StepShape, captured_shape
from qwen4exp_trt.runtime.specs import TensorSpec
from qwen4exp_trt.runtime.streams import Stream

Execute = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""Runs a step on inputs by name, all on the GPU, and returns its results there by name."""


class _Staging:
    """Memory of the host for the inputs of a step. It is free again when its last copy has ended."""

    def __init__(self, layout: InputLayout, stream: Stream) -> None:
        self._layout = layout
        self._staged = StagedInputs(layout, stream.staging(layout.num_bytes))
        self._copied = stream.event()

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
class _Prepared:
    """Steps of one shape, with the memory that they read their inputs from."""

    inputs: Tensor
    run: Callable[[], Mapping[str, Tensor]]
    """On the caller's stream; the results are good until the next run."""
    stagings: Iterator[_Staging]
    """In turns, so that a step need not wait for the one before."""


class DecodeGraphs:
    """The decode steps of one program on one GPU.

    A graph takes steps of up to its shape: its inputs are padded. All are captured on ``stream``, so a result is only
    good until the next step. ``execute_for`` a shape gives what runs its steps, ``specs`` are their inputs. Without
    ``captures`` a step is enqueued each time anew, on the same padded inputs at the same addresses. ``on_new_shape`` is
    called when the first step of a shape has run.
    """

    def __init__(
        self,
        execute_for: Callable[[StepShape], Execute],
        specs: Sequence[TensorSpec],
        limits: EngineLimits,
        device: torch.device,
        stream: Stream,
        captures: bool = True,
        on_new_shape: Callable[[], None] = lambda: None,
    ) -> None:
        self._execute_for, self._specs, self._limits, self._device = execute_for, specs, limits, device
        self._stream, self._captures, self._on_new_shape = stream, captures, on_new_shape
        self._prepared: dict[StepShape, _Prepared] = {}
        self.seconds = 0.0
        """That new shapes took: their first step, with what is compiled then, and the capture."""

    @property
    def shapes(self) -> list[StepShape]:
        """Those that steps have had so far."""
        return list(self._prepared)

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Enqueue a step on the current stream; None, and nothing is done, if it is not a decode step.

        ``inputs`` are on the CPU, or on the GPU where only their shape matters to the host. The results have the
        padded shape; the rows of the step come first. Nothing here waits for the GPU but the capture of a new shape.
        """
        shape = captured_shape(inputs, self._limits)
        if shape is None:
            return None
        if shape not in self._prepared:
            # Among them may be a result of the last step, over which the step of padding writes.
            inputs = {name: value.clone() for name, value in inputs.items()}
            self._prepared[shape] = self._prepare(shape)
        prepared = self._prepared[shape]
        next(prepared.stagings).copy(inputs, prepared.inputs)
        return prepared.run()

    def _prepare(self, shape: StepShape) -> _Prepared:
        start = time.perf_counter()
        layout, execute = InputLayout(self._specs, shape), self._execute_for(shape)
        buffer = aligned_empty((layout.num_bytes,), torch.uint8, self._device)
        buffer.copy_(layout.padding())
        views = layout.views(buffer)
        # What is loaded, allocated or chosen at a first call has to be there before the capture: one step of padding.
        run_on_stream(self._stream, execute, views)
        self._stream.synchronize()
        self._on_new_shape()
        run = self._captured(execute, views) if self._captures else partial(run_on_stream, self._stream, execute, views)
        self.seconds += time.perf_counter() - start
        return _Prepared(buffer, run, itertools.cycle([_Staging(layout, self._stream) for _ in range(2)]))

    def _captured(self, execute: Execute, views: Mapping[str, Tensor]) -> Callable[[], Mapping[str, Tensor]]:
        graph, results = self._stream.capture(lambda: execute(views))

        def replay() -> Mapping[str, Tensor]:
            graph.replay()
            return results

        return replay


def run_on_stream(stream: Stream, execute: Execute, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Enqueue a step on ``stream``, between what the caller has enqueued and what it enqueues next."""
    try:
        with stream.fork():
            return execute(inputs)
    finally:
        stream.join()  # also behind a step that failed half way: its inputs are about to be freed


def move_inputs(
    specs: Sequence[TensorSpec], inputs: Mapping[str, Tensor], device: torch.device, stream: Stream
) -> Mapping[str, Tensor]:
    """``inputs`` on ``device``, as they are, enqueued on the caller's stream."""
    shape = StepShape.of(inputs)
    there = {spec.name: inputs[spec.name] for spec in specs if not inputs[spec.name].is_cpu}
    layout = InputLayout([spec for spec in specs if spec.name not in there], shape)
    buffer = aligned_empty((layout.num_bytes,), torch.uint8, device)
    _Staging(layout, stream).copy(inputs, buffer)
    return {**layout.views(buffer), **there}
