"""A loaded bundle whose steps are timed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.backend import Backend
from qwen4exp_trt.runtime.bench.cases import Room
from qwen4exp_trt.runtime.bench.filled_states import FilledCache, fill_pages, fill_slots
from qwen4exp_trt.runtime.drafts.drafting import Drafting
from qwen4exp_trt.runtime.engine_core import EngineCore
from qwen4exp_trt.runtime.llm import LLM
from qwen4exp_trt.runtime.program_backend import ProgramBackend
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.sequence import Sequence as RequestSequence


class LoadedBundle:
    """What the measurements share: the backend of ``llm``, serving loops over it, random token ids."""

    def __init__(self, llm: LLM, seed: int = 0) -> None:
        backend = llm.core.backend
        assert isinstance(backend, ProgramBackend)
        self.llm, self.backend, self.manifest, self.device = llm, backend, llm.manifest, backend.device
        self.limits, self.num_blocks = llm.manifest.limits, llm.memory_plan.num_blocks
        self.tokenizer = llm.tokenizer
        self.vocab_size = min(self.manifest.vocab_size, self.tokenizer.vocab_size if self.tokenizer else 2**31)
        """Ids that a text may have."""
        self._generator = torch.Generator().manual_seed(seed)
        self._has_pages = False

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def vocab_limit(self) -> int | None:
        """As the serving loop has it."""
        return self.tokenizer.vocab_size if self.tokenizer else None

    @property
    def room(self) -> Room:
        return Room(self.limits, self.num_blocks, self.llm.max_num_seqs, self.backend.draft is not None)

    def random_ids(self, count: int) -> list[int]:
        return torch.randint(self.vocab_size, (count,), generator=self._generator).tolist()

    def core(self, context: int = 0, drafting: Drafting | None = None, backend: Backend | None = None) -> EngineCore:
        """A serving loop of its own, whose sequences begin behind ``context`` tokens with random states. ``backend``:
        another over the same states."""
        opener: Callable[..., Any] | None = (lambda states: FilledCache(states, context)) if context else None
        core = EngineCore(
            backend or self.backend,
            self.limits,
            self.num_blocks,
            self.manifest.vocab_size,
            (),
            self.tokenizer,
            max_num_seqs=self.llm.max_num_seqs,
            prefix_cache=opener,
            drafting=drafting,
        )
        if context:
            if not self._has_pages:
                fill_pages(core.states.pool)
                self._has_pages = True
            fill_slots(core.states.pool, context, self.vocab_size)
        return core

    def add(self, core: EngineCore, prompts: Sequence[Sequence[int]], most: int) -> list[RequestSequence]:
        """Greedy requests of the token ids ``prompts`` and up to ``most`` tokens of output, in line."""
        params = SamplingParams(temperature=0, max_tokens=most, ignore_eos=True)
        sequences = [core.make_sequence(None, ids, params) for ids in prompts]
        for sequence in sequences:
            core.add(sequence)
        return sequences

    def synchronize(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize(self.device)


def check_sequences(sequences: Sequence[RequestSequence]) -> None:
    """`BundleError` if one was dropped: its logits were not finite, or a step failed."""
    for sequence in sequences:
        if sequence.error is not None:
            raise BundleError(str(sequence.error)) from sequence.error


class Marks:
    """Times on the GPU between calls of `mark`, on the current stream; nothing waits until they are read."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._events = device, list[torch.cuda.Event]()

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)

    def seconds(self) -> list[float]:
        """From each mark to the next."""
        torch.cuda.synchronize(self._device)
        pairs = zip(self._events, self._events[1:], strict=False)
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]
