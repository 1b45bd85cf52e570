"""What executes the program: the small interface of all backends, and the eager one."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from qwen4exp_trt.runtime.decode_graphs import Execute
from qwen4exp_trt.runtime.file_identity import identity_differences
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.load_options import CudaGraphs, LoadOptions
from qwen4exp_trt.runtime.manifest import KERNELS_DIR, CheckpointRef, Manifest
from qwen4exp_trt.runtime.materialize import load_weights
from qwen4exp_trt.runtime.memory_plan import MemoryPlan, plan_memory
from qwen4exp_trt.runtime.nan_trace import NanTrace
from qwen4exp_trt.runtime.ngram_rows import NgramRows
from qwen4exp_trt.runtime.ngram_table import NgramTable, ResidentTable, TokenWindow
from qwen4exp_trt.runtime.own_linears import MOST_TOKENS, with_own_linears
from qwen4exp_trt.runtime.packed_inputs import StepShape
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.program_backend import ProgramBackend
from qwen4exp_trt.runtime.sampler import SampleRequest
from qwen4exp_trt.runtime.specs import NgramRowsSpec, PleResidency
from qwen4exp_trt.runtime.state_pool import StatePool, allocate_states
from qwen4exp_trt.runtime.step_result import SampledStep
from qwen4exp_trt.runtime.streams import CudaStream, Stream
from qwen4exp_trt.runtime.tensor_reader import TensorReader
from qwen4exp_trt.runtime.tensorrt.backend import TensorRTBackend
from qwen4exp_trt.runtime.tensorrt.capabilities import Capabilities
from qwen4exp_trt.runtime.tensorrt.engine_checks import check_engine_fits
from qwen4exp_trt.runtime.tensorrt.jit_cache import NONE as NO_JIT_CACHE
from qwen4exp_trt.runtime.tensorrt.jit_cache import USER as USER_JIT_CACHE
from qwen4exp_trt.runtime.tensorrt.jit_cache import jit_cache_folder
from qwen4exp_trt.runtime.tensorrt.module import MODULE_OF_BACKEND, load_trt

logger = logging.getLogger(__name__)

BACKENDS = ("eager", *MODULE_OF_BACKEND)


class Backend(Protocol):
    """Runs steps over states that it owns, on ``device``."""

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

    def sample_step(
        self, inputs: Mapping[str, Tensor], requests: Sequence[SampleRequest], vocab_limit: int | None
    ) -> SampledStep:
        """Run one step as `run` does, and sample as `sampler.sample` does from row i of the logits for request i.

        ``inputs`` may ask for logits of more rows.
        """
        ...

    def prefetch(self, windows: Iterable[TokenWindow], at_once: bool = False) -> None:
        """Say which tokens come after the next step, so that what they need from a disk is read while that runs.

        ``at_once``: they come in the next step, but something else runs before it.
        """
        ...


class EagerBackend(ProgramBackend):
    """A program itself in torch: op by op on a CPU, and on a GPU by the ops' CUDA kernels."""

    draft: EagerBackend | None

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
        cuda_graphs: CudaGraphs = CudaGraphs.OWN,
    ) -> None:
        is_gpu = device.type == "cuda"
        how = CudaStream(device) if is_gpu else None, cuda_graphs
        super().__init__(program, states, weights, limits, device, *how, rows, memory_plan, draft, token_ids)
        self._program_for_few = with_own_linears(program) if is_gpu else program
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

    def _execute_for(self, shape: StepShape) -> Execute:
        return self._execute

    def _on_new_shape(self) -> None:
        """Kernels that were compiled are kept by themselves."""

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
    maker = options.weight_maker
    files = [] if maker else open_weight_files(folder, manifest, options.checkpoint)
    weight_specs = distinct_weights(folder, programs)
    state_specs = tuple(spec for program in programs for spec in program.states)
    # First, so that a lack of memory shows before weights are read for minutes.
    states = allocate_states(state_specs, plan.num_blocks, limits.num_slots, device)
    if maker is not None:
        weights = maker.make_weights(weight_specs, device, manifest.host_weights, options.progress)
    else:
        logger.info("loading %d weights from %s", len(weight_specs), ", ".join(str(file.path) for file in files))
        with TensorReader(*files) as reader:
            weights = load_weights(weight_specs, reader, device, options.progress, manifest.host_weights)

    def parts(program: Program) -> tuple[Program, Mapping[str, Tensor], Mapping[str, Tensor]]:
        return program, states, {spec.name: weights[spec.name] for spec in program.weights}

    model, *drafts = programs
    residency = PleResidency(manifest.ple_residency)
    rows: NgramTable = ResidentTable(residency)
    if maker is not None:
        rows = maker.make_ngram_table(model.inputs, residency)
    elif any(isinstance(spec, NgramRowsSpec) for spec in model.inputs):
        rows = NgramRows(model.inputs, TensorReader(*files), limits.num_slots, options.row_cache_bytes)
        rows.measure_disks()
    if device.type == "cuda":
        use_cubins(folder / KERNELS_DIR)
    graphs = options.graphs_on(device.type)
    draft = None
    if drafts:
        token_ids = load_token_ids(folder, manifest)
        draft = EagerBackend(*parts(drafts[0]), limits, device, token_ids=token_ids, cuda_graphs=graphs)
    backend = EagerBackend(*parts(model), limits, device, rows, plan, draft, cuda_graphs=graphs)
    if options.debug_nan:
        backend.watch_nan()
    return backend


@dataclass(frozen=True)
class BackendChoice:
    """What will execute a bundle."""

    name: str
    device: torch.device
    cuda_graphs: CudaGraphs
    trt: ModuleType | None
    """None for ``eager``."""


def choose_backend(
    name: str, device: str | None, folder: Path, manifest: Manifest, options: LoadOptions
) -> BackendChoice:
    """The backend called ``name`` on ``device`` (None: the CPU for ``eager``, else the GPU), before anything is loaded.

    `BundleError` for one that there is not, an absent device, options that it lacks, or an engine that does not fit.
    """
    if name not in BACKENDS:
        raise BundleError(f"there is no backend {name!r}; use one of {', '.join(BACKENDS)}")
    is_eager = name == "eager"
    if options.debug_nan and not is_eager:
        raise BundleError(
            f"debug_nan (--debug-nan) looks at the result of each op, and the backend {name!r} runs a whole engine; "
            "use the backend 'eager'"
        )
    chosen = device_from_name(device or ("cpu" if is_eager else "cuda"), for_engine=not is_eager)
    graphs = options.graphs_on(chosen.type)
    if is_eager:
        if graphs == CudaGraphs.TENSORRT or (graphs == CudaGraphs.OWN and chosen.type == "cpu"):
            raise BundleError(
                f"cuda_graphs (--cuda-graphs) is {str(graphs)!r}, which the backend 'eager' on {chosen} cannot "
                "do; use 'none'"
            )
        if str(options.jit_cache) not in (USER_JIT_CACHE, NO_JIT_CACHE):
            raise BundleError(
                f"jit_cache (--jit-cache) is {str(options.jit_cache)!r}, but the backend 'eager' has no engine whose "
                "compiled kernels could be kept; leave the option out"
            )
        return BackendChoice(name, chosen, graphs, None)
    trt = load_trt(name)
    check_engine_fits(trt, folder, manifest, chosen)
    Capabilities(trt).check_graphs(graphs)
    jit_cache_folder(options.jit_cache, folder, Capabilities(trt))
    return BackendChoice(name, chosen, graphs, trt)


def load_backend(choice: BackendChoice, folder: Path, manifest: Manifest, options: LoadOptions) -> ProgramBackend:
    """Load what was chosen; `BundleError` if there is too little memory."""
    loaded = load_eager_backend(folder, manifest, options, choice.device, runs_engine=choice.trt is not None)
    if choice.trt is None:
        return loaded
    return engines_of(choice.trt, folder, manifest, loaded, choice.cuda_graphs, options.jit_cache)


def engines_of(
    trt: ModuleType,
    folder: Path,
    manifest: Manifest,
    loaded: EagerBackend,
    cuda_graphs: CudaGraphs = CudaGraphs.OWN,
    jit_cache: str | Path = NO_JIT_CACHE,
    make_stream: Callable[[torch.device], Stream] = CudaStream,
) -> TensorRTBackend:
    """The engines of the bundle ``folder`` in place of the programs in ``loaded``, over the same states and weights."""
    device = loaded.device

    def engine(part: EagerBackend, draft: TensorRTBackend | None, is_draft: bool) -> TensorRTBackend:
        memory = part.program, part.states, part.weights, device, part.rows, part.memory_plan
        how = draft, is_draft, make_stream(device), cuda_graphs, jit_cache
        return TensorRTBackend(trt, folder, manifest, *memory, *how)

    draft = None if loaded.draft is None else engine(loaded.draft, None, is_draft=True)
    return engine(loaded, draft, is_draft=False)


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
