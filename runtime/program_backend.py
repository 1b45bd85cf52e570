"""What all backends share: steps of a program, captured where they can be, and the tokens sampled from them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.decode_graphs import DecodeGraphs, Execute, move_inputs
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.load_options import CudaGraphs
from qwen4exp_trt.runtime.memory_plan import MemoryPlan
from qwen4exp_trt.runtime.ngram_table import NgramTable, ResidentTable, TokenWindow
from qwen4exp_trt.runtime.packed_inputs import StepShape
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.sampler import (
    SAMPLING_INPUTS,
    SampledToken,
    SampleRequest,
    draw,
    draw_rows,
    report,
    sample,
    sampling_operands,
)
from qwen4exp_trt.runtime.specs import TensorSpec
from qwen4exp_trt.runtime.state_pool import StatePool
from qwen4exp_trt.runtime.step_result import (
    DrawnStep,
    SampledStep,
    StepResult,
    drawn_step,
    real_rows,
    stack_of,
    step_result,
)
from qwen4exp_trt.runtime.streams import Stream


class ProgramBackend(ABC):
    """Runs steps of ``program`` over ``states`` and ``weights``, which are on ``device``, within ``limits``.

    A step with few tokens of every sequence is one CUDA graph (`DecodeGraphs`) where ``cuda_graphs`` says so, any other
    is enqueued kernel by kernel. ``stream``: where; None for a CPU that computes at once. ``rows`` complete the inputs
    of steps, if the program takes rows of a table that is on disk. ``memory_plan``: what the bundle was loaded by.
    ``draft`` runs the draft head, if it is loaded. The inputs of a step are on the CPU; ids and the ``stack`` that a
    draft head takes may be on ``device`` too, and are then copied there.
    """

    results_are_reused = False
    """Whether a step that is not captured writes its results where the last one did."""

    def __init__(
        self,
        program: Program,
        states: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        limits: EngineLimits,
        device: torch.device,
        stream: Stream | None,
        cuda_graphs: CudaGraphs,
        rows: NgramTable | None,
        memory_plan: MemoryPlan | None,
        draft: ProgramBackend | None,
        token_ids: Tensor | None,
    ) -> None:
        self.program, self.weights, self.rows, self.device = program, weights, rows or ResidentTable(), device
        self.limits, self.memory_plan, self.stream = limits, memory_plan, stream
        self.token_ids = token_ids
        """int64 ``[V]`` on the CPU: the ids that the columns of the logits stand for, ascending; None for all ids."""
        self.draft = draft
        others = [self.rows.states, *([draft.states] if draft is not None else [])]
        self.states = StatePool(program.states, states).joined(*others)
        self.cuda_graphs = CudaGraphs.NONE if stream is None else cuda_graphs
        self._graphs: DecodeGraphs | None = None
        if stream is not None and self.cuda_graphs != CudaGraphs.NONE:
            self._graphs = self._make_graphs(self._execute_for, ())
        self._sampling_graphs: dict[int | None, DecodeGraphs] = {}
        """Steps that end with the sampled tokens, by the limit of their ids."""
        self._is_closed = False

    @abstractmethod
    def _execute(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Run a step that is not captured, on inputs on the device; results are by name, on the caller's stream."""

    @abstractmethod
    def _execute_for(self, shape: StepShape) -> Execute:
        """What runs steps of ``shape``, in a block of the stream, to be captured."""

    @abstractmethod
    def _on_new_shape(self) -> None:
        """What to do when the first step of a shape has run that is captured."""

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The logits of `run_step`."""
        return self.run_step(inputs).logits

    def run_step(self, inputs: Mapping[str, Tensor]) -> StepResult:
        """Run one step and update the states."""
        self._check_open()
        return self._run(self.rows.complete(inputs))

    def prefetch(self, windows: Iterable[TokenWindow], at_once: bool = False) -> None:
        self.rows.prefetch(windows, at_once)

    def sample_step(
        self, inputs: Mapping[str, Tensor], requests: Sequence[SampleRequest], vocab_limit: int | None
    ) -> SampledStep:
        """Run one step, update the states, and sample as `sampler.sample` does from row i of the logits for request i.

        Of a captured step the tokens are all that the host waits for. ``inputs`` may ask for logits of more rows.
        """
        self._check_open()
        inputs = self.rows.complete(inputs)
        if self._graphs is not None:
            with self._on_device():
                results = self._graphs_that_sample(vocab_limit).run({**inputs, **sampling_operands(requests)})
                if results is not None:
                    stacks = [spec for spec in self.program.outputs if spec.name != "logits"]
                    stack = stack_of(real_rows(stacks, results, inputs, is_reused=True))
                    return SampledStep(_report(results, requests, vocab_limit), stack)
        result = self._run(inputs)
        return SampledStep(sample(result.logits[: len(requests)], requests, vocab_limit), result.stack)

    def draw_step(
        self, inputs: Mapping[str, Tensor], operands: Mapping[str, Tensor], vocab_limit: int | None
    ) -> DrawnStep:
        """Run one step, update the states, and draw from each row of the logits by ``operands`` (`SAMPLING_INPUTS`, on
        the CPU). Nothing waits for the GPU."""
        self._check_open()
        inputs = self.rows.complete(inputs)
        if self._graphs is not None:
            with self._on_device():
                results = self._graphs_that_sample(vocab_limit).run({**inputs, **operands})
                if results is not None:
                    rows = real_rows(self.program.outputs, results, inputs, is_reused=False)
                    drawn = results["drawn"][:, : len(rows["logits"])]
                    return DrawnStep(drawn, rows["logits"], stack_of(rows))
        return drawn_step(self._run(inputs), operands, vocab_limit)

    @property
    def preparation(self) -> tuple[int, float]:
        """Shapes of steps that were prepared so far, and the seconds that this took."""
        graphs = [*([self._graphs] if self._graphs is not None else []), *self._sampling_graphs.values()]
        return sum(len(each.shapes) for each in graphs), sum(each.seconds for each in graphs)

    def close(self) -> None:
        """Let go of what steps need; none can be run afterwards. May be called twice."""
        if self.stream is not None and not self._is_closed:
            self.stream.synchronize()
        self._is_closed, self._graphs = True, None
        self._sampling_graphs.clear()
        if self.draft is not None:
            self.draft.close()

    def _run(self, inputs: Mapping[str, Tensor]) -> StepResult:
        outputs = self.program.outputs
        if self.stream is None:
            return step_result(real_rows(outputs, self._execute(inputs), inputs, is_reused=self.results_are_reused))
        with self._on_device():
            results = None if self._graphs is None else self._graphs.run(inputs)
            if results is not None:
                return step_result(real_rows(outputs, results, inputs, is_reused=True))
            results = self._execute(move_inputs(self.program.inputs, inputs, self.device, self.stream))
            return step_result(real_rows(outputs, results, inputs, is_reused=self.results_are_reused))

    def _graphs_that_sample(self, vocab_limit: int | None) -> DecodeGraphs:
        def execute_for(shape: StepShape) -> Execute:
            execute = self._execute_for(shape)

            def execute_and_draw(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
                results = execute(inputs)
                logits = results["logits"]
                return {**results, "drawn": draw(logits, logits, inputs, vocab_limit)}

            return execute_and_draw

        if vocab_limit not in self._sampling_graphs:
            self._sampling_graphs[vocab_limit] = self._make_graphs(execute_for, SAMPLING_INPUTS)
        return self._sampling_graphs[vocab_limit]

    def _make_graphs(self, execute_for: Callable[[StepShape], Execute], more: Sequence[TensorSpec]) -> DecodeGraphs:
        assert self.stream is not None
        captures = self.cuda_graphs == CudaGraphs.OWN
        specs = (*self.program.inputs, *more)
        return DecodeGraphs(execute_for, specs, self.limits, self.device, self.stream, captures, self._on_new_shape)

    def _check_open(self) -> None:
        if self._is_closed:
            raise BundleError("this backend was closed, so it runs nothing more; load the bundle again")

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Where steps are enqueued; `BundleError` for one that finds no memory for its intermediate results."""
        on: AbstractContextManager[object] = nullcontext()
        if self.device.type == "cuda":
            on = torch.cuda.device(self.device)
        try:
            with on:
                yield
        except torch.OutOfMemoryError as error:
            raise BundleError(
                f"no memory is left on {self.device} for a step; load the bundle with a smaller num_blocks, or build "
                f"it with a smaller --prefill-chunk: {error}"
            ) from error


def _report(
    results: Mapping[str, Tensor], requests: Sequence[SampleRequest], vocab_limit: int | None
) -> list[SampledToken | None]:
    """The tokens of a captured step. It samples from logits as they are: other rows are sampled again."""
    logits, drawn = results["logits"][: len(requests)], results["drawn"]
    rows = [row for row, request in enumerate(requests) if not request.is_plain]
    if rows:
        drawn = drawn.clone()
        drawn[:, rows] = draw_rows(logits[rows].float(), [requests[row] for row in rows], vocab_limit)
    return report(drawn.cpu(), logits, requests, vocab_limit)
