"""Steps with drafts of the full-size model on the GPU at hand: random weights, filled caches, the serving loop.

    python benchmarks/drafts_full_size.py tests/fixtures/released_config.json

For each batch and context the time of a step without drafts, of one that verifies three drafts, and of one in which the
draft head proposes them as well, beside what their bytes take at the bandwidth of a copy in this run. With random
weights next to no draft is accepted, which costs as much as if all were. Appends a line for each measurement to
``benchmarks/results/drafts_full_size.jsonl``.

What a GB10 could do is an estimate: the bytes of a step at 233 GB/s, and the acceptance that others report of the
released draft head, 0.89, 0.86 and 0.85 for the first, second and third draft if those before it are accepted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from full_size_model import PRECISIONS, FullSizeModel, make_programs
from results_file import append_result
from torch import Tensor

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.plugins.cost import StepSize
from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.bench.filled_states import fill_states
from qwen4exp_trt.runtime.bench.random_weights import RandomWeights
from qwen4exp_trt.runtime.bench.rates import Bandwidth, measure_bandwidth
from qwen4exp_trt.runtime.drafts.acceptance import RequestAcceptance
from qwen4exp_trt.runtime.drafts.config import SpeculativeConfig
from qwen4exp_trt.runtime.drafts.drafting import Drafting
from qwen4exp_trt.runtime.drafts.mtp_proposer import MtpProposer
from qwen4exp_trt.runtime.engine_core import EngineCore
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.program_text import load_program
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.scheduler import ScheduledSequence
from qwen4exp_trt.runtime.sequence import Sequence
from qwen4exp_trt.runtime.state_pool import allocate_states
from qwen4exp_trt.runtime.step_costs import step_cost
from qwen4exp_trt.runtime.target_devices import DEVICES

SCENARIOS = ((1, 2048), (1, 32768), (4, 2048), (4, 32768))
"""Sequences and context."""
NUM_DRAFTS = 3
ACCEPTANCE = (0.89, 0.86, 0.85)
"""Reported by others, for the released checkpoint; not measured here."""
STEPS, WARM_UP = 100, 20
LIMITS = EngineLimits(max_batch_size=4, max_seq_len=65_536, prefill_chunk=2048, block_size=64)
NUM_BLOCKS = max(batch * (context // LIMITS.block_size + 8) for batch, context in SCENARIOS)


@dataclass(frozen=True)
class Measurement:
    """One line of the result; times in milliseconds."""

    precision: str
    batch: int
    context: int
    kind: str
    """``plain``: a token a step; ``verify``: and three drafts, of nobody; ``mtp``: of the draft head."""
    step_ms: float
    floor_ms: float
    step_bytes: int
    gb10_floor_ms: float
    gb10_tokens_per_second: float
    """An estimate: at the reported acceptance, and the most that the bytes allow."""


class RandomDrafts:
    """Proposes tokens that are all but never right."""

    states = None
    num_lookahead = num_rewritten = 0

    def observe(self, entries: list[ScheduledSequence], stack: Tensor | None) -> None:
        pass

    def propose(self, wanted: list[tuple[Sequence, int]]) -> None:
        for sequence, count in wanted:
            sequence.set_drafts([(sequence.token_ids[-1] + 7 + index) % 1000 for index in range(count)])


class Model(FullSizeModel):
    """With a draft head, whose embedding and ``lm_head`` are the model's."""

    def __init__(self, config: ModelConfig, precision: str, folder: Path, head_folder: Path) -> None:
        super().__init__(config, precision, folder, LIMITS, NUM_BLOCKS)
        program, device = load_program(head_folder), self.backend.device
        weights = {**RandomWeights().make_weights(program.weights, device), **self.backend.weights}
        own = {spec.name: weights[spec.name] for spec in program.weights}
        states = allocate_states(program.states, NUM_BLOCKS, LIMITS.num_slots, device)
        self.head = EagerBackend(program, states, own, LIMITS, device)
        self.backend.states = self.backend.states.joined(self.head.states)

    def core_of(self, kind: str, context: int) -> EngineCore:
        config = SpeculativeConfig("mtp", NUM_DRAFTS)
        drafting = None
        if kind == "verify":
            drafting = Drafting(config, RandomDrafts())  # pyright: ignore[reportArgumentType]
        elif kind == "mtp":
            vocab_size = self.config.vocab_size
            drafting = Drafting(config, MtpProposer(self.head, NUM_DRAFTS, LIMITS.block_size, vocab_size, None))
        return self.core_within(LIMITS, context, drafting)

    def step_seconds(self, kind: str, batch: int, context: int) -> float:
        """The median of steps of the serving loop."""
        fill_states(self.backend.states, context, self.config.vocab_size)
        core, generator = self.core_of(kind, context), torch.Generator().manual_seed(0)
        params = SamplingParams(temperature=0, max_tokens=(NUM_DRAFTS + 1) * (STEPS + 1), ignore_eos=True)
        sequences = [core.make_sequence(None, self.random_prompt(context + 1, generator), params) for _ in range(batch)]
        for sequence in sequences:
            core.add(sequence)
        seconds = []
        for _ in range(STEPS):
            start = time.perf_counter()
            core.step()
            seconds.append(time.perf_counter() - start)
            for sequence in sequences:
                sequence.acceptance = RequestAcceptance()  # drafts go on although they are in vain
        for sequence in sequences:
            assert sequence.error is None and len(sequence.draft_token_ids) == (0 if kind == "plain" else NUM_DRAFTS)
            core.abort(sequence)
        return statistics.median(seconds[WARM_UP:])

    def bytes_of(self, kind: str, batch: int, context: int) -> int:
        """Each row chooses experts of its own, as random ones do."""
        rows = batch * (1 if kind == "plain" else NUM_DRAFTS + 1)
        num_bytes = step_cost(self.program, StepSize(batch, rows, context, num_logits=rows)).memory_bytes
        if kind == "mtp":  # the head reads its weights for each draft
            num_bytes += NUM_DRAFTS * step_cost(self.head.program, StepSize(batch, batch, context)).memory_bytes
        return num_bytes

    def measure(self, kind: str, batch: int, context: int, bandwidth: Bandwidth) -> Measurement:
        num_bytes, expected, chance = self.bytes_of(kind, batch, context), 1.0, 1.0
        for rate in () if kind == "plain" else ACCEPTANCE:
            chance *= rate
            expected += chance
        gb10 = num_bytes / DEVICES["sm121"].bytes_per_second
        return Measurement(
            precision=self.precision,
            batch=batch,
            context=context,
            kind=kind,
            step_ms=1e3 * self.step_seconds(kind, batch, context),
            floor_ms=1e3 * num_bytes / bandwidth.copy,
            step_bytes=num_bytes,
            gb10_floor_ms=1e3 * gb10,
            gb10_tokens_per_second=batch * expected / gb10,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps with drafts of the full-size model, with random weights.")
    parser.add_argument("config", type=Path)
    parser.add_argument("--precision", choices=PRECISIONS, default="nvfp4")
    parser.add_argument("--programs", type=Path, help="folder to make the programs in, or to find them in")
    parser.add_argument("--only-programs", action="store_true", help="make them and stop")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = args.programs or Path(temporary)
        if not (root / args.precision).exists():
            root.mkdir(exist_ok=True)
            make_programs(args.config, [args.precision], LIMITS, root)
        if not args.only_programs:
            measure_all(ModelConfig.from_file(args.config), args.precision, root / args.precision)


def measure_all(config: ModelConfig, precision: str, folder: Path) -> None:
    """Measure the scenarios with the programs in ``folder``."""
    bandwidth = measure_bandwidth()
    print(f"{torch.cuda.get_device_name()}: {bandwidth}", flush=True)
    model = Model(config, precision, folder, folder / "draft_head")
    for batch, context in SCENARIOS:
        for kind in ("plain", "verify", "mtp"):
            measured = model.measure(kind, batch, context, bandwidth)
            print(measured, flush=True)
            append_result("drafts_full_size", {**asdict(measured), **asdict(bandwidth)})
    print(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of the GPU were in use")


if __name__ == "__main__":
    main()
