"""Times of decode steps: in the serving loop, on the GPU alone, and of the host that enqueues them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from qwen4exp_trt.errors import BundleError
from qwen4exp_trt.runtime.bench.cases import DecodeCase, Effort, StepKind, new_tokens
from qwen4exp_trt.runtime.bench.loaded import LoadedBundle, Marks, check_sequences
from qwen4exp_trt.runtime.bench.spread import Spread
from qwen4exp_trt.runtime.drafts.acceptance import RequestAcceptance
from qwen4exp_trt.runtime.drafts.config import SpeculativeConfig
from qwen4exp_trt.runtime.drafts.drafting import Drafting, make_drafting
from qwen4exp_trt.runtime.engine_core import EngineCore
from qwen4exp_trt.runtime.sampler import greedy_operands
from qwen4exp_trt.runtime.scheduler import ScheduledSequence
from qwen4exp_trt.runtime.sequence import Sequence as RequestSequence
from qwen4exp_trt.runtime.state_pool import StatePool
from qwen4exp_trt.runtime.step_inputs import build_step_inputs

Clock = Callable[[], float]


@dataclass(frozen=True)
class DeviceTimes:
    """Of one step that is enqueued again and again, with its sampling, while nothing waits for it."""

    step_ms: Spread
    """On the GPU, from the end of one to the end of the next. Where the host takes longer to enqueue a step than the
    GPU to run it, that of the host."""
    enqueue_ms: Spread
    """Of the host, for a step that finds the GPU idle and that it does not wait for."""


@dataclass(frozen=True)
class DecodeTimes:
    """Of one case."""

    first_step_ms: float
    """Of the first step with these sizes: with what is captured, compiled or chosen then."""
    step_ms: Spread
    """From step to step in the serving loop, until the tokens are on the host."""
    device: DeviceTimes | None
    """None where there is no GPU, and for steps with a draft head, which are several runs."""
    tokens_per_step: float
    """That the steps gave, all sequences together; drafts of random states are all but never accepted."""


class _RandomDrafts:
    """Proposes tokens that are all but never right."""

    states: StatePool | None = None
    num_lookahead = num_rewritten = 0

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def observe(self, entries: Sequence[ScheduledSequence], stack: Tensor | None) -> None:
        """Nothing is learned."""

    def propose(self, wanted: Sequence[tuple[RequestSequence, int]]) -> None:
        for sequence, count in wanted:
            sequence.set_drafts([(sequence.token_ids[-1] + 7 + index) % self._vocab_size for index in range(count)])


def measure_decode(
    bundle: LoadedBundle, case: DecodeCase, effort: Effort, clock: Clock = time.perf_counter
) -> DecodeTimes:
    """Steps of ``case``; `BundleError` if a sequence was dropped, as logits were not finite."""
    core = bundle.core(case.context, _drafting(bundle, case))
    prompts = [bundle.random_ids(case.context + 1) for _ in range(case.batch)]
    sequences = bundle.add(core, prompts, most=new_tokens(effort, case.rows) - 1)
    try:
        seconds, tokens = _time_steps(core, sequences, effort, clock)
        device = None
        if bundle.is_gpu and case.kind is not StepKind.DRAFT:
            device = _time_device(bundle, core, sequences, case.drafts, effort, clock)
    finally:
        for sequence in sequences:
            core.abort(sequence)
    timed = seconds[1 + effort.warm_up :]
    return DecodeTimes(1e3 * seconds[0], _milliseconds(timed), device, tokens / (len(seconds) - 1))


def _drafting(bundle: LoadedBundle, case: DecodeCase) -> Drafting | None:
    if case.kind is StepKind.PLAIN:
        return None
    config = SpeculativeConfig("mtp", case.drafts)
    if case.kind is StepKind.VERIFY:
        return Drafting(config, _RandomDrafts(bundle.vocab_size))
    return make_drafting(config, bundle.backend.draft, bundle.manifest, bundle.tokenizer)


def _time_steps(
    core: EngineCore, sequences: Sequence[RequestSequence], effort: Effort, clock: Clock
) -> tuple[list[float], int]:
    """Seconds of the first step, of those to warm up and of those that count; and the tokens of all but the first."""
    seconds, begin, before = list[float](), 0.0, 0
    # The first step of sequences with drafts is without.
    for index in range(1 + effort.warm_up + effort.iterations):
        if index == 1:
            before = _num_tokens(sequences)
        if index == 1 + effort.warm_up:
            begin = clock()
        num_timed = index - 1 - effort.warm_up
        if num_timed >= effort.least and clock() - begin > effort.seconds:
            break
        for sequence in sequences:
            sequence.acceptance = RequestAcceptance()  # drafts go on although they are in vain
        start = clock()
        ran = core.step()
        seconds.append(clock() - start)
        check_sequences(sequences)
        if len(ran) != len(sequences):
            raise BundleError(f"only {len(ran)} of {len(sequences)} sequences were in a step: there are too few pages")
    return seconds, _num_tokens(sequences) - before


def _num_tokens(sequences: Sequence[RequestSequence]) -> int:
    return sum(sequence.num_output_tokens for sequence in sequences)


def _time_device(
    bundle: LoadedBundle,
    core: EngineCore,
    sequences: Sequence[RequestSequence],
    drafts: int,
    effort: Effort,
    clock: Clock,
) -> DeviceTimes:
    """The next step of ``sequences``, run again and again: its states are written over each time."""
    for sequence in sequences:
        assert core.states.reserve(sequence, drafts + 1), "pages of the next step"
    entries = [ScheduledSequence(sequence, drafts + 1, drafts) for sequence in sequences]
    inputs, _ = build_step_inputs(entries)
    operands = greedy_operands(len(inputs["logits_indices"]))

    def enqueue() -> None:
        bundle.backend.draw_step(inputs, operands, bundle.vocab_limit)

    marks = Marks(bundle.device)
    for _ in _rounds(effort, effort.warm_up, clock):
        enqueue()
    bundle.synchronize()
    marks.mark()
    for _ in _rounds(effort, effort.iterations, clock):
        enqueue()
        marks.mark()
    on_device, seconds = marks.seconds(), list[float]()
    for _ in _rounds(effort, effort.iterations, clock):
        bundle.synchronize()
        start = clock()
        enqueue()
        seconds.append(clock() - start)
    bundle.synchronize()
    return DeviceTimes(_milliseconds(on_device), _milliseconds(seconds))


def _rounds(effort: Effort, most: int, clock: Clock) -> Iterator[int]:
    """Up to ``most``, and no more than `Effort.least` of them when the time of a case is over."""
    begin = clock()
    for index in range(most):
        if index >= effort.least and clock() - begin > effort.seconds:
            return
        yield index


def _milliseconds(seconds: Sequence[float]) -> Spread:
    return Spread.of([1e3 * each for each in seconds])
