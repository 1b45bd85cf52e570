"""What tests of generation share: short forms of prompts and results, and a look into the serving loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from qwen4exp_trt.runtime import LLM, RequestOutput
from qwen4exp_trt.runtime.program_backend import ProgramBackend
from qwen4exp_trt.runtime.sampler import SampleRequest
from qwen4exp_trt.runtime.step_result import SampledStep


def ids(token_ids: Any) -> dict[str, Any]:
    """The prompt of token ids."""
    return {"prompt_token_ids": token_ids}


def generated(output: RequestOutput) -> list[int]:
    """The ids of the only output."""
    (completion,) = output.outputs
    return completion.token_ids


def loaded_backend(llm: LLM) -> ProgramBackend:
    """What ``llm`` runs steps on, with its weights and states."""
    backend = llm.core.backend
    assert isinstance(backend, ProgramBackend)
    return backend


def assert_idle(llm: LLM) -> None:
    """No request is left, and all memory is back, once the prefix cache has let go of its pages."""
    scheduler, limits = llm.core.scheduler, llm.manifest.limits
    llm.core.prefix_cache.evict(scheduler.num_blocks)
    assert scheduler.num_unfinished == 0
    assert (scheduler.num_free_slots, scheduler.num_free_blocks) == (limits.num_slots, scheduler.num_blocks)


@contextmanager
def observed_steps(llm: LLM) -> Iterator[list[dict[str, Any]]]:
    """The inputs of every step inside the block."""
    backend, steps = llm.core.backend, []

    class Observer:
        prefetch = staticmethod(backend.prefetch)

        def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
            steps.append({name: value.tolist() for name, value in inputs.items()})
            return backend.run(inputs)

        def sample_step(
            self, inputs: Mapping[str, Tensor], requests: Sequence[SampleRequest], vocab_limit: int | None
        ) -> SampledStep:
            steps.append({name: value.tolist() for name, value in inputs.items()})
            return backend.sample_step(inputs, requests, vocab_limit)

    llm.core.backend = Observer()
    try:
        yield steps
    finally:
        llm.core.backend = backend
