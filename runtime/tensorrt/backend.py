"""Executes a bundle's engine: the backends ``tensorrt`` and ``tensorrt-rtx``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.aligned_memory import aligned_empty
from qwen4exp_trt.runtime.bundle_programs import load_token_ids
from qwen4exp_trt.runtime.decode_graphs import Execute, run_on_stream
from qwen4exp_trt.runtime.load_options import CudaGraphs
from qwen4exp_trt.runtime.manifest import DRAFT_DIR, ENGINE_FILE, Manifest
from qwen4exp_trt.runtime.memory_plan import MemoryPlan
from qwen4exp_trt.runtime.ngram_table import NgramTable
from qwen4exp_trt.runtime.packed_inputs import StepShape
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.program_backend import ProgramBackend
from qwen4exp_trt.runtime.specs import TensorSpec, extent_of
from qwen4exp_trt.runtime.streams import CudaStream, Stream
from qwen4exp_trt.runtime.tensorrt import jit_cache as jit
from qwen4exp_trt.runtime.tensorrt.bindings import Bindings, is_bindable
from qwen4exp_trt.runtime.tensorrt.capabilities import Capabilities
from qwen4exp_trt.runtime.tensorrt.engine_checks import check_engine_fits
from qwen4exp_trt.runtime.tensorrt.engine_tensors import check_io_tensors, check_profiles
from qwen4exp_trt.runtime.tensorrt.session import Context, Session
from qwen4exp_trt.runtime.weights import dtype_from_name

logger = logging.getLogger(__name__)


class TensorRTBackend(ProgramBackend):
    """Runs an engine of the bundle ``folder`` over buffers of this process: the model's, or its draft head's.

    ``trt`` is the TensorRT module; ``program`` says what the engine's tensors are; ``states`` and ``weights`` are bound
    by name and stay where they are, on ``device`` or in host memory that it reads. Prompts and decode steps that are
    not captured have an execution context each, of their optimization profiles; each shape of captured steps has its
    own, since a graph is only good for the context that it was captured from. All share their activation memory, since
    one runs at a time. ``stream``: where the engine runs; by default one of the GPU. ``jit_cache``: where to keep what
    TensorRT for RTX compiles (`jit_cache`).

    Raises BundleError if the engine was built for another GPU or by another TensorRT, or its tensors are not those of
    the program.
    """

    draft: TensorRTBackend | None
    results_are_reused = True

    def __init__(
        self,
        trt: ModuleType,
        folder: Path,
        manifest: Manifest,
        program: Program,
        states: Mapping[str, Tensor],
        weights: Mapping[str, Tensor],
        device: torch.device,
        rows: NgramTable | None = None,
        memory_plan: MemoryPlan | None = None,
        draft: TensorRTBackend | None = None,
        is_draft: bool = False,
        stream: Stream | None = None,
        cuda_graphs: CudaGraphs = CudaGraphs.OWN,
        jit_cache: str | Path = jit.NONE,
    ) -> None:
        check_engine_fits(trt, folder, manifest, device)
        Capabilities(trt).check_graphs(cuda_graphs)
        cache_folder = jit.jit_cache_folder(jit_cache, folder, Capabilities(trt))
        token_ids = load_token_ids(folder, manifest) if is_draft else None
        stream = stream or CudaStream(device)
        how = stream, cuda_graphs, rows, memory_plan, draft, token_ids
        super().__init__(program, states, weights, manifest.limits, device, *how)
        assert not is_draft or manifest.draft is not None, folder
        self.trt = trt
        built = manifest.draft if is_draft and manifest.draft else manifest
        self.profiles: dict[str, Any] = built.profiles
        name = f"{DRAFT_DIR}/{ENGINE_FILE}" if is_draft else ENGINE_FILE
        cache = jit.JitCache(cache_folder and cache_folder / jit.file_name(trt, manifest, name))
        self.session = Session(trt, folder / name, device, stream, self.cuda_graphs, cache)
        part = (folder / name).parent
        check_io_tensors(part, trt, self.session.engine, program, built.debug_outputs)
        check_profiles(part, self.session.engine, self.profiles)
        self.outputs = allocate_outputs(program.outputs, manifest, device)
        self.debug_outputs = allocate_outputs(built.debug_outputs, manifest, device)
        """Values between the layers, if the engine shows some: of a step, in as many elements in front as it has."""
        tensors = {**self.states, **weights, **self.outputs, **self.debug_outputs}
        self._bindings = Bindings(program, tensors, self.profiles, device, built.debug_outputs)
        self._profile_indices = {name: index for index, name in enumerate(self.profiles)}
        self.contexts = {name: self._make_context(name) for name in self.profiles}
        cache.save()
        if draft is not None:  # only one of the two runs at a time
            smaller, larger = sorted((self.session, draft.session), key=lambda session: session.activations.nbytes)
            smaller.use_activations(larger.activations)
        logger.info("%s: %s", folder / name, ", ".join(f"{key} {value}" for key, value in self.info.items()))

    @property
    def info(self) -> dict[str, str]:
        """What executes, and what was chosen."""
        return {
            "tensorrt": f"{self.trt.__name__} {self.trt.__version__}",
            "cuda_graphs": str(self.cuda_graphs),
            "jit_cache": str(self.session.jit_cache.path or jit.NONE),
        }

    def _execute(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        assert self.stream is not None
        given = {name: value if is_bindable(value) else _aligned_copy(value) for name, value in inputs.items()}
        context = self.contexts[self._bindings.check_step(given)]
        return run_on_stream(self.stream, partial(self._run_in, context), given)

    def _run_in(self, context: Context, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        context.enqueue(inputs)
        return self.outputs

    def _execute_for(self, shape: StepShape) -> Execute:
        is_captured = self.cuda_graphs == CudaGraphs.OWN
        context: Context | None = None

        def execute(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
            nonlocal context
            given = {spec.name: inputs[spec.name] for spec in self.program.inputs}
            if context is None:
                context = self._make_context(self._bindings.check_step(given), is_captured)
            try:
                context.enqueue(given)
            except BundleError:  # the next step of this shape will try again
                self.session.drop(context)
                context = None
                raise
            return {
                spec.name: self.outputs[spec.name][: extent_of(spec.shape[0], shape.dims)]
                for spec in self.program.outputs
            }

        return execute

    def _on_new_shape(self) -> None:
        """A process may end without `close`."""
        self.session.jit_cache.save()

    def _make_context(self, profile: str, is_captured: bool = False) -> Context:
        return self.session.make_context(self._profile_indices[profile], self._bindings, is_captured)

    def close(self) -> None:
        super().close()
        self.contexts.clear()
        self.session.close()


def allocate_outputs(specs: Sequence[TensorSpec], manifest: Manifest, device: torch.device) -> dict[str, Tensor]:
    """Memory for outputs of steps of any size, by name."""
    extents = manifest.limits.largest_step
    return {
        spec.name: aligned_empty([extent_of(dim, extents) for dim in spec.shape], dtype_from_name(spec.dtype), device)
        for spec in specs
    }


def _aligned_copy(tensor: Tensor) -> Tensor:
    copy = aligned_empty(tensor.shape, tensor.dtype, tensor.device)
    copy.copy_(tensor)
    return copy
