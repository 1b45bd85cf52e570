"""Executes a bundle's engine: the backends ``tensorrt`` and ``tensorrt-rtx``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.plugins.spec import element_shape
from qwen4exp_trt.plugins.tensorrt import register_creators
from qwen4exp_trt.runtime.bundle_programs import load_token_ids
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.manifest import DRAFT_DIR, ENGINE_FILE, Manifest
from qwen4exp_trt.runtime.memory_plan import MemoryPlan
from qwen4exp_trt.runtime.ngram_table import NgramTable, ResidentTable, TokenWindow
from qwen4exp_trt.runtime.program import Program
from qwen4exp_trt.runtime.sampler import SampleRequest, sample
from qwen4exp_trt.runtime.specs import TensorSpec, extent_of
from qwen4exp_trt.runtime.state_pool import StatePool
from qwen4exp_trt.runtime.step_result import DrawnStep, SampledStep, StepResult, drawn_step, real_rows, step_result
from qwen4exp_trt.runtime.tensorrt.engine_tensors import check_io_tensors
from qwen4exp_trt.runtime.tensorrt.log import make_log
from qwen4exp_trt.runtime.weights import dtype_from_name


class TensorRTBackend:
    """Runs an engine of the bundle ``folder`` over buffers of this process: the model's, or its draft head's.

    ``trt`` is the TensorRT module; ``program`` says what the engine's tensors are; ``states`` and ``weights`` are bound
    by name and stay where they are, on ``device`` or in host memory that it reads; ``rows`` complete the inputs of
    steps, if the program takes rows of a table that is on disk. There is an execution context for each optimization
    profile; they share their activation memory, since one runs at a time. Raises BundleError if the engine was built
    for another GPU or by another TensorRT, or its tensors are not those of the program.
    """

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
    ) -> None:
        check_engine_fits(trt, folder, manifest, device)
        self.trt, self.program, self.weights, self.rows = trt, program, weights, rows or ResidentTable()
        others = [self.rows.states, *([draft.states] if draft is not None else [])]
        self.states = StatePool(program.states, states).joined(*others)
        self.memory_plan = memory_plan
        self.device, self.stream = device, None if device.type == "cpu" else torch.cuda.Stream(device)
        self.log = make_log(trt)
        part = folder / DRAFT_DIR if is_draft else folder
        self.engine = self._deserialize(part / ENGINE_FILE)
        assert not is_draft or manifest.draft is not None, folder
        built = manifest.draft if is_draft and manifest.draft else manifest
        check_io_tensors(part, trt, self.engine, program, built.debug_outputs)
        self.profiles = built.profiles
        self.draft = draft
        self.token_ids = load_token_ids(folder, manifest) if is_draft else None
        """As that of `EagerBackend`."""
        self.outputs = _allocate(program.outputs, manifest.limits, device)
        self.debug_outputs = _allocate(built.debug_outputs, manifest.limits, device)
        """What the engine gives besides, if it was built so: after a step, in as many elements in front as it has."""
        self._activations = self._allocate_activations()
        self.contexts = {name: self._make_context(index, name) for index, name in enumerate(self.profiles)}
        if draft is not None:  # only one of the two runs at a time
            smaller, larger = sorted((self, draft), key=lambda backend: backend._activations.nbytes)
            smaller._use_activations(larger._activations)

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The logits of `run_step`."""
        return self.run_step(inputs).logits

    def sample_step(
        self, inputs: Mapping[str, Tensor], requests: Sequence[SampleRequest], vocab_limit: int | None
    ) -> SampledStep:
        """Run one step, update the states, and sample as `sampler.sample` does: from row i for request i."""
        result = self.run_step(inputs)
        return SampledStep(sample(result.logits[: len(requests)], requests, vocab_limit), result.stack)

    def run_step(self, inputs: Mapping[str, Tensor]) -> StepResult:
        """Run one step and update the states."""
        inputs = self.rows.complete(inputs)
        profile = self._profile_for(inputs)
        context = self.contexts[profile]
        with self._on_stream():
            bound = {spec.name: inputs[spec.name].to(self.device).contiguous() for spec in self.program.inputs}
            for name, tensor in bound.items():
                self._check(context.set_input_shape(name, tuple(tensor.shape)), f"set the shape of {name}")
                self._check(context.set_tensor_address(name, tensor.data_ptr()), f"bind {name}")
            self._check(context.execute_async_v3(self._stream_handle()), f"execute the profile {profile}")
            result = step_result(real_rows(self.program.outputs, self.outputs, inputs, is_reused=True))
        if self.stream is not None:
            torch.cuda.current_stream(self.device).wait_stream(self.stream)
        return result

    def draw_step(
        self, inputs: Mapping[str, Tensor], operands: Mapping[str, Tensor], vocab_limit: int | None
    ) -> DrawnStep:
        """As that of `EagerBackend`."""
        return drawn_step(self.run_step(inputs), operands, vocab_limit)

    def prefetch(self, windows: Iterable[TokenWindow], at_once: bool = False) -> None:
        self.rows.prefetch(windows, at_once)

    def _profile_for(self, inputs: Mapping[str, Tensor]) -> str:
        """The first profile whose ranges hold the shapes of ``inputs``."""
        for profile, ranges in self.profiles.items():
            if all(_is_within(tensor, ranges[name]) for name, tensor in inputs.items() if name in ranges):
                return profile
        shapes = {name: list(tensor.shape) for name, tensor in inputs.items()}
        raise BundleError(f"no profile of the engine ({', '.join(self.profiles)}) holds a step of the shapes {shapes}")

    def _deserialize(self, path: Path) -> Any:
        register_creators(self.trt)
        self._runtime = self.trt.Runtime(self.log)  # has to outlive the engine
        engine = self._runtime.deserialize_cuda_engine(path.read_bytes())
        if engine is None:
            raise BundleError(f"{path}: TensorRT cannot load it: {self.log.problems()}")
        return engine

    def _allocate_activations(self) -> Tensor:
        """What the most demanding profile needs."""
        sizes = [self.engine.get_device_memory_size_for_profile_v2(index) for index in range(len(self.profiles))]
        return torch.empty(max([*sizes, 1]), dtype=torch.uint8, device=self.device)

    def _use_activations(self, memory: Tensor) -> None:
        self._activations = memory
        for context in self.contexts.values():
            context.set_device_memory(memory.data_ptr(), memory.nbytes)

    def _make_context(self, index: int, profile: str) -> Any:
        """The context of a profile, with every address bound that no step changes."""
        context = self.engine.create_execution_context(self.trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if context is None:
            raise BundleError(f"TensorRT cannot make an execution context: {self.log.problems()}")
        with self._on_stream():
            selected = context.set_optimization_profile_async(index, self._stream_handle())
        self._check(selected, f"select the profile {profile}")
        context.set_device_memory(self._activations.data_ptr(), self._activations.nbytes)
        for spec in self.program.states:
            state = self.states[spec.name]
            shape = tuple(element_shape(state.shape, state.dtype))
            self._check(context.set_input_shape(spec.name, shape), f"set the shape of {spec.name}")
            for name in (spec.name, spec.out_name):  # updated in place
                self._check(context.set_tensor_address(name, state.data_ptr()), f"bind {name}")
        for name, tensor in {**self.weights, **self.outputs, **self.debug_outputs}.items():
            self._check(context.set_tensor_address(name, tensor.data_ptr()), f"bind {name}")
        return context

    def _check(self, succeeded: bool, what: str) -> None:
        if not succeeded:
            raise BundleError(f"TensorRT could not {what}: {self.log.problems()}")

    def _on_stream(self) -> AbstractContextManager[Any]:
        """What is done on the engine's stream, behind the work that the caller's stream has."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(self.stream)

    def _stream_handle(self) -> int:
        return 0 if self.stream is None else self.stream.cuda_stream


def _allocate(specs: Iterable[TensorSpec], limits: EngineLimits, device: torch.device) -> dict[str, Tensor]:
    """Memory for outputs of the largest step, by name."""
    return {
        spec.name: torch.empty(
            [extent_of(dim, limits.largest_step) for dim in spec.shape],
            dtype=dtype_from_name(spec.dtype),
            device=device,
        )
        for spec in specs
    }


def check_engine_fits(trt: ModuleType, folder: Path, manifest: Manifest, device: torch.device) -> None:
    """`BundleError` unless ``trt`` and the GPU are those that the bundle's engine was built for."""
    if manifest.target is None:
        raise BundleError(
            f"{folder}: has no engine, as it was built with {manifest.activation_dtype} activations; use the backend "
            "'eager', or build it with --activation-dtype bfloat16"
        )
    built_by, ours = manifest.tools.get(trt.__name__), trt.__version__
    if built_by != ours:
        found = "another TensorRT package" if built_by is None else f"{trt.__name__} {built_by}"
        raise BundleError(
            f"{folder}: its engine was built by {manifest.backend} ({found}), this is {trt.__name__} {ours}; build the "
            "bundle again with this one, or install that one"
        )
    if device.type == "cuda":
        own = "sm{}{}".format(*torch.cuda.get_device_capability(device))
        if own != manifest.target:
            raise BundleError(
                f"{folder}: its engine is for {manifest.target}, this GPU ({torch.cuda.get_device_name(device)}) is "
                f"{own}; build the bundle with --target {own}, or use the backend 'eager'"
            )


def _is_within(tensor: Tensor, shape_range: Any) -> bool:
    smallest, _, largest = shape_range
    return len(tensor.shape) == len(smallest) and all(
        low <= extent <= high for low, extent, high in zip(smallest, tensor.shape, largest, strict=True)
    )
