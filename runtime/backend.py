"""What executes the program: the small interface of all backends, and the eager one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.plugins.execute import use_cubins
from qwen4exp_trt.runtime.bundle_programs import distinct_weights, load_programs, load_token_ids
from qwen4exp_trt.runtime.checkpoint import Checkpoint, listing
from qwen4exp_trt.runtime.cuda_device import device_from_name, exact_matmuls, limit_allocations
from qwen4exp_trt.runtime.decode_graphs import DecodeGraphs, move_inputs
from qwen4exp_trt.runtime.file_identity import identity_differences
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.load_options import LoadOptions
from qwen4exp_trt.runtime.manifest import KERNELS_DIR, CheckpointRef, Manifest
from qwen4exp_trt.runtime.materialize import load_weights
from qwen4exp_trt.runtime.memory_plan import MemoryPlan, plan_memory
from qwen4exp_trt.runtime.nan_trace import NanTrace
from qwen4exp_trt.runtime.ngram_rows import NgramRows
from qwen4exp_trt.runtime.ngram_table import NgramTable, ResidentTable, TokenWindow
from qwen4exp_trt.runtime.own_linears import MOST_TOKENS, with_own_linears
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
from qwen4exp_trt.runtime.specs import NgramRowsSpec, PleResidency
from qwen4exp_trt.runtime.state_pool import StatePool, allocate_states
from qwen4exp_trt.runtime.step_result import (
    DrawnStep,
    SampledStep,
    StepResult,
    drawn_step,
    real_rows,
    stack_of,
    step_result,
)
from qwen4exp_trt.runtime.tensor_reader import TensorReader
from qwen4exp_trt.runtime.tensorrt.backend import TensorRTBackend, check_engine_fits
from qwen4exp_trt.runtime.tensorrt.module import MODULE_OF_BACKEND, load_trt

logger = logging.getLogger(__name__)

BACKENDS = ("eager", *MODULE_OF_BACKEND)


class Backend(Protocol):
    """Runs steps over states that it owns, on ``device``. It may sample as well: see `EagerBackend.sample_step`."""

    @property
    def device(self) -> torch.device: ...

    @property
    def states(self) -> StatePool:
        """Every state that a step updates, also those that are not in the device's memory, and those of ``draft``."""
        ...

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Run one step, update the states, and return float32 logits ``[L, vocab_size]``.

        `UnreadableRowsError` before anything has changed: the step can be run without the sequences that it names.
        """
        ...

    def prefetch(self, windows: Iterable[TokenWindow], at_once: bool = False) -> None:
        """Say which tokens come after the next step, so that what they need from a disk is read while that runs.

        ``at_once``: they come in the next step, but something else runs before it.
        """
        ...


class EagerBackend:
    """A program itself in torch: op by op on a CPU, and on a GPU by the ops' CUDA kernels.

    On a GPU a step with few tokens of every sequence is one CUDA graph (`DecodeGraphs`), any other op by op. ``states``
    and ``weights`` are those of the program by name, on ``device``; steps are within ``limits``. ``rows`` complete
    their inputs, if the program takes rows of a table that is on disk. ``memory_plan``: what it was loaded by.
    ``draft`` runs the draft head, if it is loaded. The inputs of a step are on the CPU; ids and the ``stack`` that a
    draft head takes may be on ``device`` too, and are then copied there.
    """

    def __init__(
        self,
        program: Program,
        states: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        limits: EngineLimits,
        device: torch.device,
        rows: NgramTable | None = None,
        memory_plan: MemoryPlan | None = None,
        draft: EagerBackend | None = None,
        token_ids: Tensor | None = None,
    ) -> None:
        self.program, self.weights, self.rows, self.device = program, weights, rows or ResidentTable(), device
        self.limits, self.memory_plan, self.draft = limits, memory_plan, draft
        self.token_ids = token_ids
        """int64 ``[V]`` on the CPU: the ids that the columns of the logits stand for, ascending; None for all ids."""
        others = [self.rows.states, *([draft.states] if draft is not None else [])]
        self.states = StatePool(program.states, states).joined(*others)
        self._graphs, self._program_for_few = None, program
        if device.type == "cuda":
            self._program_for_few = with_own_linears(program)
            self._pool = torch.cuda.graph_pool_handle()
            self._graphs = DecodeGraphs(self._execute, program.inputs, limits, device, self._pool)
        self._sampling_graphs: dict[int | None, DecodeGraphs] = {}
        """Steps that end with the sampled tokens, by the limit of their ids."""
        self._watch: Callable[..., Any] | None = None
        self.nan_trace: NanTrace | None = None
        """Of the last step, if it was watched."""

    def watch(self, execute: Callable[..., Any]) -> None:
        """Run all steps from now on op by op through ``execute``, which looks at values: see `Program.run`."""
        self._graphs, self._watch = None, execute

    def watch_nan(self) -> None:
        """`watch` all steps, since none can be run again, and keep what `NanTrace` has of the last."""
        self.nan_trace = NanTrace(self.program)
        self.watch(self.nan_trace.run)

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The logits of `run_step`."""
        return self.run_step(inputs).logits

    def run_step(self, inputs: Mapping[str, Tensor]) -> StepResult:
        """Run one step and update the states."""
        return self._run(self.rows.complete(inputs))

    def prefetch(self, windows: Iterable[TokenWindow], at_once: bool = False) -> None:
        self.rows.prefetch(windows, at_once)

    def _run(self, inputs: Mapping[str, Tensor]) -> StepResult:
        outputs = self.program.outputs
        if self.device.type == "cpu":
            return step_result(real_rows(outputs, self._execute(inputs), inputs, is_reused=False))
        with torch.cuda.device(self.device), _steps_that_fit(self.device):
            results = None if self._graphs is None else self._graphs.run(inputs)
            if results is not None:
                return step_result(real_rows(outputs, results, inputs, is_reused=True))
            results = self._execute(move_inputs(self.program.inputs, inputs, self.device))
            return step_result(real_rows(outputs, results, inputs, is_reused=False))

    def sample_step(
        self, inputs: Mapping[str, Tensor], requests: Sequence[SampleRequest], vocab_limit: int | None
    ) -> SampledStep:
        """Run one step, update the states, and sample as `sampler.sample` does from row i of the logits for request i.

        Of a captured step the tokens are all that the host waits for. ``inputs`` may ask for logits of more rows.
        """
        inputs = self.rows.complete(inputs)
        if self._graphs is not None:
            with torch.cuda.device(self.device), _steps_that_fit(self.device):
                results = self._graphs_that_sample(vocab_limit).run({**inputs, **sampling_operands(requests)})
                if results is not None:
                    stacks = [spec for spec in self.program.outputs if spec.name != "logits"]
                    stack = stack_of(real_rows(stacks, results, inputs, is_reused=True))
                    return SampledStep(self._report(results, requests, vocab_limit), stack)
        result = self._run(inputs)
        return SampledStep(sample(result.logits[: len(requests)], requests, vocab_limit), result.stack)

    def draw_step(
        self, inputs: Mapping[str, Tensor], operands: Mapping[str, Tensor], vocab_limit: int | None
    ) -> DrawnStep:
        """Run one step, update the states, and draw from each row of the logits by ``operands`` (`SAMPLING_INPUTS`, on
        the CPU). Nothing waits for the GPU."""
        inputs = self.rows.complete(inputs)
        if self._graphs is not None:
            with torch.cuda.device(self.device), _steps_that_fit(self.device):
                results = self._graphs_that_sample(vocab_limit).run({**inputs, **operands})
                if results is not None:
                    rows = real_rows(self.program.outputs, results, inputs, is_reused=False)
                    drawn = results["drawn"][:, : len(rows["logits"])]
                    return DrawnStep(drawn, rows["logits"], stack_of(rows))
        return drawn_step(self._run(inputs), operands, vocab_limit)

    def _graphs_that_sample(self, vocab_limit: int | None) -> DecodeGraphs:
        def execute(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
            results = self._execute(inputs)
            logits = results["logits"]
            return {**results, "drawn": draw(logits, logits, inputs, vocab_limit)}

        if vocab_limit not in self._sampling_graphs:
            specs = (*self.program.inputs, *SAMPLING_INPUTS)
            self._sampling_graphs[vocab_limit] = DecodeGraphs(execute, specs, self.limits, self.device, self._pool)
        return self._sampling_graphs[vocab_limit]

    @staticmethod
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

    def _execute(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        has_few = len(inputs["input_ids"]) <= MOST_TOKENS
        program = self._program_for_few if has_few else self.program
        with exact_matmuls():
            if self._watch is not None:
                return self.program.run(inputs, self.states, self.weights, self._watch)
            return program.run(inputs, self.states, self.weights)


def load_eager_backend(
    folder: Path,
    manifest: Manifest,
    options: LoadOptions,
    device: torch.device,
    runs_engine: bool = False,
) -> EagerBackend:
    """The program of the bundle ``folder`` with its weights, and states of as many pages as `plan_memory` allows.

    A draft head that ``options`` ask for is the result's ``draft``; weights that both use are there once.
    ``runs_engine``: for an engine beside it, whose memory is planned as well.
    """
    programs, limits = load_programs(folder, manifest, options.with_draft_head), manifest.limits
    plan = plan_memory(programs, manifest, options, device, runs_engine)
    limit_allocations(plan, device)
    files = open_weight_files(folder, manifest, options.checkpoint)
    weight_specs = distinct_weights(folder, programs)
    state_specs = tuple(spec for program in programs for spec in program.states)
    # First, so that a lack of memory shows before weights are read for minutes.
    states = allocate_states(state_specs, plan.num_blocks, limits.num_slots, device)
    logger.info("loading %d weights from %s", len(weight_specs), ", ".join(str(file.path) for file in files))
    with TensorReader(*files) as reader:
        weights = load_weights(weight_specs, reader, device, options.progress, manifest.host_weights)

    def parts(program: Program) -> tuple[Program, Mapping[str, Tensor], Mapping[str, Tensor]]:
        return program, states, {spec.name: weights[spec.name] for spec in program.weights}

    model, *drafts = programs
    rows: NgramTable = ResidentTable(PleResidency(manifest.ple_residency))
    if any(isinstance(spec, NgramRowsSpec) for spec in model.inputs):
        rows = NgramRows(model.inputs, TensorReader(*files), limits.num_slots, options.row_cache_bytes)
        rows.measure_disks()
    if device.type == "cuda":
        use_cubins(folder / KERNELS_DIR)
    draft = None
    if drafts:
        token_ids = load_token_ids(folder, manifest)
        draft = EagerBackend(*parts(drafts[0]), limits, device, token_ids=token_ids)
    backend = EagerBackend(*parts(model), limits, device, rows, plan, draft)
    if options.debug_nan:
        backend.watch_nan()
    return backend


@contextmanager
def _steps_that_fit(device: torch.device) -> Iterator[None]:
    """`BundleError` for a step that finds no memory for its intermediate results."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise BundleError(
            f"no memory is left on {device} for a step; load the bundle with a smaller num_blocks, or build it with a "
            f"smaller --prefill-chunk: {error}"
        ) from error


def make_backend(
    name: str, device: str | None, folder: Path, manifest: Manifest, options: LoadOptions
) -> EagerBackend | TensorRTBackend:
    """The backend called ``name``, loaded, on ``device`` (None: the CPU for ``eager``, else the GPU).

    `BundleError` for one that there is not, an absent device, an engine that does not fit, or too little memory.
    """
    if name not in BACKENDS:
        raise BundleError(f"there is no backend {name!r}; use one of {', '.join(BACKENDS)}")
    is_eager = name == "eager"
    if options.debug_nan and not is_eager:
        raise BundleError(
            f"debug_nan (--debug-nan) looks at the result of each op, and the backend {name!r} runs a whole engine; "
            "use the backend 'eager'"
        )
    chosen = device_from_name(device or ("cpu" if is_eager else "cuda"))
    if is_eager:
        return load_eager_backend(folder, manifest, options, chosen)
    if chosen.type == "cpu":
        raise BundleError(f"the backend {name!r} executes on a GPU; use device 'cuda', or the backend 'eager'")
    trt = load_trt(name)
    check_engine_fits(trt, folder, manifest, chosen)  # before weights are read for minutes
    return engines_of(trt, folder, manifest, load_eager_backend(folder, manifest, options, chosen, runs_engine=True))


def engines_of(trt: ModuleType, folder: Path, manifest: Manifest, loaded: EagerBackend) -> TensorRTBackend:
    """The engines of the bundle ``folder`` in place of the programs in ``loaded``, over the same states and weights."""
    bundle, draft = (trt, folder, manifest), None
    if (own := loaded.draft) is not None:
        draft = TensorRTBackend(*bundle, own.program, own.states, own.weights, own.device, is_draft=True)
    parts = loaded.program, loaded.states, loaded.weights, loaded.device, loaded.rows, loaded.memory_plan
    return TensorRTBackend(*bundle, *parts, draft)


def open_weight_files(folder: Path, manifest: Manifest, checkpoint: Path | None) -> list[Checkpoint]:
    """The checkpoint that the bundle was built from and what was converted from it; the files of both are checked."""
    opened = open_checkpoint(folder, manifest.checkpoint, checkpoint)
    return [opened] if manifest.converted is None else [opened, _open_converted(folder, manifest.converted)]


def open_checkpoint(folder: Path, ref: CheckpointRef | None, override: Path | None) -> Checkpoint:
    """The checkpoint that the bundle was built from, at its recorded path or at ``override``; its files are checked."""
    if ref is None:
        raise BundleError(f"{folder}: built with --config-only, so it has no weights; build it from the checkpoint")
    if override is None and not Path(ref.path).is_dir():
        raise BundleError(
            f"{folder}: the checkpoint that it was built from is no longer at {ref.path}; say where it is now with "
            "--checkpoint (checkpoint=...)"
        )
    checkpoint = Checkpoint.open(override or ref.path)
    checkpoint.verify_identity(ref.files)
    return checkpoint


def _open_converted(folder: Path, ref: CheckpointRef) -> Checkpoint:
    """At its recorded path, or beside a bundle that was moved together with it."""
    places = list(dict.fromkeys((Path(ref.path), folder.resolve().parent / Path(ref.path).name)))
    problems = {}
    for place in filter(Path.is_dir, places):
        problems[place] = identity_differences(place, ref.files)
        if not problems[place]:
            return Checkpoint.open_files(place, ref.files)
    for place, differences in problems.items():
        raise BundleError(
            f"{folder}: its converted weights in {place} are not those that it was built with: {listing(differences)}; "
            "remove such files and build the bundle again"
        )
    where = " or ".join(map(str, places))
    raise BundleError(f"{folder}: its converted weights are not at {where}; move them there, or build the bundle again")
