"""Times the scheduler itself: what a step of the engine takes beside the model, sampling and detokenizing.

    python benchmarks/scheduler.py

The backend computes nothing and returns a token for each row of logits, and there is no tokenizer: what is left of a
step is scheduling, the tensors of its metadata, and the bookkeeping behind it. Prints a line for each load of 64
sequences, appends it to ``benchmarks/results/scheduler.jsonl``, and exits with 1 if a step takes more than `BAR_MS`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch
from results_file import append_result
from torch import Tensor

from qwen4exp_trt.runtime.drafts.config import SpeculativeConfig
from qwen4exp_trt.runtime.drafts.drafting import Drafting
from qwen4exp_trt.runtime.engine_core import EngineCore
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.ngram_table import TokenWindow
from qwen4exp_trt.runtime.sampler import SampledToken, SampleRequest
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.sequence import Sequence as RequestSequence
from qwen4exp_trt.runtime.state_pool import StatePool
from qwen4exp_trt.runtime.step_result import SampledStep

BAR_MS = 1.0
NUM_SEQS, VOCAB_SIZE, TOKEN = 64, 248_320, 7
LIMITS = EngineLimits(max_batch_size=NUM_SEQS, max_seq_len=262_144, prefill_chunk=2048, block_size=64)
NUM_BLOCKS = LIMITS.max_num_blocks
STEPS, BLOCKS, WARM_UP = 20, 6, 20
"""Steps of a block; the fastest block counts, since what else the machine does only slows a step down."""
NUM_DRAFTS = 3
SHORT, LONG = 512, LIMITS.max_seq_len - 1024
"""Tokens of prompts."""
ENDLESS = SamplingParams(temperature=0.7, top_p=0.9, seed=0, max_tokens=None, ignore_eos=True)


class NullBackend:
    """Has no states, and takes no time that is counted."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.states = StatePool((), {})
        self.called = self.returned = 0.0
        """When its last step began and ended."""

    def prefetch(self, windows: Iterable[TokenWindow], at_once: bool = False) -> None:
        """It reads nothing."""

    def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
        raise NotImplementedError("steps sample")

    def sample_step(
        self, inputs: Mapping[str, Tensor], requests: Sequence[SampleRequest], vocab_limit: int | None
    ) -> SampledStep:
        self.called = time.thread_time()
        tokens: list[SampledToken | None] = [SampledToken(TOKEN, -1.0, 1, None)] * len(requests)
        self.returned = time.thread_time()
        return SampledStep(tokens, None)


class FixedDrafts:
    """Proposes the tokens that the backend samples, so that all are accepted."""

    states = None
    num_lookahead = num_rewritten = 0

    def observe(self, entries: object, stack: object) -> None:
        pass

    def propose(self, wanted: Sequence[tuple[RequestSequence, int]]) -> None:
        for sequence, count in wanted:
            sequence.set_drafts([TOKEN] * count)


@dataclass(frozen=True)
class Load:
    """What the 64 sequences do."""

    name: str
    start: Callable[[EngineCore], None]
    """Adds the requests and runs them up to where they are measured."""
    with_drafts: bool = False
    chunk: int = LIMITS.prefill_chunk
    """Of prompts."""


@dataclass(frozen=True)
class Measurement:
    """One line of the result; of a step, milliseconds that the thread had the CPU: others may want it as well."""

    load: str
    num_seqs: int
    before_ms: float
    """Until the backend is called: scheduling and metadata."""
    after_ms: float
    """From its return on: tokens, states and what has ended."""
    step_ms: float
    slowest_ms: float


def add(core: EngineCore, num_requests: int, num_tokens: int, params: SamplingParams = ENDLESS) -> None:
    prompt = [TOKEN] * num_tokens
    for _ in range(num_requests):
        core.add(core.make_sequence(None, prompt, params))


def run_prompts(core: EngineCore) -> None:
    """Steps until all that is there decodes."""
    core.step()
    while core.scheduler.num_waiting or any(each.num_tokens_left > 1 for each in core.scheduler.running):
        core.step()


def beside_a_prompt(core: EngineCore) -> None:
    add(core, NUM_SEQS - 1, SHORT)
    run_prompts(core)
    add(core, 1, LONG)


def decode(core: EngineCore, num_tokens: int = SHORT) -> None:
    add(core, NUM_SEQS, num_tokens)
    run_prompts(core)


def come_and_go(core: EngineCore) -> None:
    add(core, 4096, 100, replace(ENDLESS, max_tokens=16))
    for _ in range(100):
        core.step()


LOADS = (
    Load("decode", decode),
    Load("decode beside a long prompt", beside_a_prompt),
    Load(f"{NUM_DRAFTS} drafts a sequence", decode, with_drafts=True),
    Load("short requests come and go", come_and_go),
    Load("decode at 261,120 tokens", partial(decode, num_tokens=LONG), chunk=2**16),
)


def measure(load: Load) -> Measurement:
    backend = NullBackend()
    drafting = Drafting(SpeculativeConfig.parse(f"ngram:{NUM_DRAFTS}"), FixedDrafts()) if load.with_drafts else None
    limits = replace(LIMITS, prefill_chunk=load.chunk)
    core = EngineCore(backend, limits, NUM_BLOCKS, VOCAB_SIZE, (), None, drafting=drafting)
    load.start(core)
    for _ in range(WARM_UP):
        core.step()
    blocks = [_measure_block(core, backend) for _ in range(BLOCKS)]
    steps, before, after = min(blocks, key=lambda block: statistics.median(block[0]))
    median = statistics.median
    return Measurement(load.name, NUM_SEQS, median(before), median(after), median(steps), max(steps))


def _measure_block(core: EngineCore, backend: NullBackend) -> tuple[list[float], list[float], list[float]]:
    """Milliseconds of some steps, of their parts before the backend, and of those behind it."""
    before, after = [], []
    for _ in range(STEPS):
        start = time.thread_time()
        changed = core.step()
        end = time.thread_time()
        assert len(changed) == NUM_SEQS, len(changed)
        before.append(1e3 * (backend.called - start))
        after.append(1e3 * (end - backend.returned))
    return [sum(pair) for pair in zip(before, after, strict=True)], before, after


def main() -> int:
    print(f"{'load of 64 sequences':<30}{'before ms':>10}{'after ms':>10}{'step ms':>10}{'slowest':>10}")
    measured = [measure(load) for load in LOADS]
    for each in measured:
        print(
            f"{each.load:<30}{each.before_ms:>10.3f}{each.after_ms:>10.3f}{each.step_ms:>10.3f}{each.slowest_ms:>10.3f}"
        )
        append_result("scheduler", asdict(each))
    slow = [f"{each.load}: {each.step_ms:.3f} ms" for each in measured if each.step_ms > BAR_MS]
    if slow:
        print(f"more than {BAR_MS:g} ms a step: {', '.join(slow)}", file=sys.stderr)
    return 1 if slow else 0


if __name__ == "__main__":
    sys.exit(main())
