"""Decodes with the full-size model on the GPU at hand: random weights, filled caches, the serving loop of the runtime.

    python benchmarks/decode_full_size.py tests/fixtures/released_config.json

Prints for each batch size and context the time of a step beside what its bytes take at the bandwidth of a copy in this
run, and a table of the kernels of one step. Appends a line for each measurement to
``benchmarks/results/decode_full_size.jsonl``, and exits with 1 when a bar is exceeded. The n-gram table is NVFP4, so
that all of it fits an H200 beside experts in NVFP4 and everything else in BF16 (``checkpoint``). Of several precisions
in one process only the first has the host at its full speed, since kernels are profiled in between.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from expert_choices import mean_distinct_experts
from full_size_model import PRECISIONS, FullSizeModel, make_programs
from kernel_table import Kernels, profile_kernels
from results_file import append_result
from torch import Tensor

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.plugins.cost import Cost, StepSize
from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.bench.filled_states import fill_states
from qwen4exp_trt.runtime.bench.rates import Bandwidth, measure_bandwidth
from qwen4exp_trt.runtime.decode_graphs import move_inputs
from qwen4exp_trt.runtime.engine_core import EngineCore
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.scheduler import ScheduledSequence
from qwen4exp_trt.runtime.sequence import Sequence as RequestSequence
from qwen4exp_trt.runtime.step_costs import step_cost
from qwen4exp_trt.runtime.step_inputs import build_step_inputs
from qwen4exp_trt.runtime.streams import CudaStream
from qwen4exp_trt.runtime.target_devices import DEVICES

SCENARIOS = ((1, 2048), (1, 32768), (1, 200_000), (4, 2048), (4, 32768), (16, 2048), (16, 32768))
"""Sequences and context."""
QUICK_SCENARIOS = ((1, 2048), (1, 200_000))
TABLES = ((1, 2048), (16, 2048))
"""The scenarios whose kernels are listed."""
DRAFT_STEP_ROWS = 4
STEPS, WARM_UP, REPLAYS = 100, 20, 20
LIMITS = EngineLimits(max_batch_size=16, max_seq_len=262_144, prefill_chunk=2048, block_size=64)
NUM_BLOCKS = max(batch * (context // LIMITS.block_size + 8) for batch, context in SCENARIOS)
FLOOR_BAR, LONG_CONTEXT_BAR = 3.0, 1.15
"""Times the floor that a step of one sequence at 2,048 tokens may take with nvfp4; and times that at 200,000."""


@dataclass(frozen=True)
class Measurement:
    """One line of the result; times in milliseconds."""

    precision: str
    batch: int
    context: int
    rows: int
    """New tokens of a sequence in a step."""
    step_ms: float
    """From step to step in the serving loop, until the sampled tokens are on the host."""
    gpu_ms: float
    """Of the captured step alone, back to back."""
    floor_ms: float
    weight_bytes: int
    state_bytes: int
    distinct_experts: float
    kernels: int
    kernels_ms: float
    """From start to end of each, added up; more than `gpu_ms` where they overlap."""
    gb10_floor_ms: float

    @property
    def tokens_per_second(self) -> float:
        return 1e3 * self.batch * self.rows / self.step_ms

    def __str__(self) -> str:
        return (
            f"{self.precision:<11}{self.batch:>6}{self.context:>9}{self.rows:>5}{self.step_ms:>9.3f}{self.gpu_ms:>9.3f}"
            f"{self.tokens_per_second:>10.1f}{(self.weight_bytes + self.state_bytes) / 1e9:>9.3f}{self.floor_ms:>9.3f}"
            f"{self.step_ms / self.floor_ms:>7.2f}{self.gpu_ms / self.floor_ms:>7.2f}{self.kernels:>8}"
            f"{1e3 * self.batch * self.rows / self.gb10_floor_ms:>11.1f}"
        )


HEADER = (
    f"{'precision':<11}{'batch':>6}{'context':>9}{'rows':>5}{'step ms':>9}{'GPU ms':>9}{'tokens/s':>10}{'GB':>9}"
    f"{'floor ms':>9}{'x step':>7}{'x GPU':>7}{'kernels':>8}{'GB10 est.':>11}"
)
NOTES = (
    "floor: the step's bytes at the bandwidth of the copy above; GB10 est.: an estimate, the most tokens a second that "
    "233 GB/s allow for the same bytes"
)


class Model(FullSizeModel):
    """What decodes with filled caches."""

    def __init__(self, config: ModelConfig, precision: str, folder: Path) -> None:
        super().__init__(config, precision, folder, LIMITS, NUM_BLOCKS)

    def open_sequences(self, core: EngineCore, batch: int, context: int, new_tokens: int) -> list[RequestSequence]:
        """``batch`` sequences of ``context`` tokens, for which the states are filled, and ``new_tokens`` to run."""
        fill_states(self.backend.states, context, self.config.vocab_size)
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        generator = torch.Generator().manual_seed(0)
        prompts = [self.random_prompt(context + new_tokens, generator) for _ in range(batch)]
        return [core.make_sequence(None, ids, replace(params, max_tokens=STEPS + 1)) for ids in prompts]

    def decode(self, batch: int, context: int) -> tuple[list[float], dict[str, Tensor]]:
        """Seconds of the steps of the serving loop, and the inputs of the last one."""
        core = self.core_within(LIMITS, context)
        sequences = self.open_sequences(core, batch, context, new_tokens=1)
        for sequence in sequences:
            core.add(sequence)
        seconds = []
        for _ in range(STEPS):
            start = time.perf_counter()
            core.step()
            seconds.append(time.perf_counter() - start)
        inputs, _ = build_step_inputs([ScheduledSequence(sequence, 1) for sequence in sequences])
        for sequence in sequences:
            assert sequence.error is None, sequence.error
            core.abort(sequence)
        return seconds[WARM_UP:], inputs

    def verify_drafts(self, context: int, rows: int) -> tuple[list[float], dict[str, Tensor]]:
        """The same of steps that run ``rows`` tokens of one sequence and take the best token of each row."""
        (sequence,) = self.open_sequences(self.core, 1, context, rows * STEPS)
        assert self.core.scheduler.acquire_memory(sequence)
        self.core.states.commit(sequence, context)
        seconds, inputs = [], {}
        for _ in range(STEPS):
            start = time.perf_counter()
            inputs, _ = build_step_inputs([ScheduledSequence(sequence, rows)], all_rows=True)
            self.backend.run(inputs).argmax(-1).tolist()
            seconds.append(time.perf_counter() - start)
            self.core.states.commit(sequence, rows)
        self.core.scheduler.finish(sequence)
        return seconds[WARM_UP:], inputs

    def cost_of(self, batch: int, context: int, rows: int, distinct_experts: float) -> Cost:
        size = StepSize(batch, batch * rows, context, num_logits=batch * rows, distinct_experts=distinct_experts)
        return step_cost(self.program, size)

    def run(self, batch: int, context: int, rows: int) -> tuple[list[float], dict[str, Tensor]]:
        return self.decode(batch, context) if rows == 1 else self.verify_drafts(context, rows)

    def step_ms(self, batch: int, context: int, rows: int) -> tuple[float, float]:
        """Of the serving loop and of the GPU alone: the times of `Measurement`."""
        seconds, inputs = self.run(batch, context, rows)
        return 1e3 * statistics.median(seconds), _replay_ms(self.backend, inputs)

    def measure(
        self, batch: int, context: int, rows: int, times: tuple[float, float], bandwidth: Bandwidth
    ) -> tuple[Measurement, Kernels]:
        """With the ``times`` that `step_ms` gave."""
        _, inputs = self.run(batch, context, rows)
        kernels = profile_kernels(lambda: self.backend.run(inputs))
        moved = move_inputs(self.program.inputs, inputs, self.backend.device, CudaStream(self.backend.device))
        distinct = mean_distinct_experts(self.program, moved, self.backend.states, self.backend.weights)
        step = self.cost_of(batch, context, rows, distinct)
        measured = Measurement(
            precision=self.precision,
            batch=batch,
            context=context,
            rows=rows,
            step_ms=times[0],
            gpu_ms=times[1],
            floor_ms=1e3 * step.memory_bytes / bandwidth.copy,
            weight_bytes=step.weight_bytes,
            state_bytes=step.state_bytes,
            distinct_experts=distinct,
            kernels=round(kernels.all.calls),
            kernels_ms=kernels.all.runs / 1e3,
            gb10_floor_ms=1e3 * step.memory_bytes / DEVICES["sm121"].bytes_per_second,
        )
        return measured, kernels


def _replay_ms(backend: EagerBackend, inputs: dict[str, Tensor]) -> float:
    """Of one step when the host is ahead of the GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    backend.run(inputs)
    torch.cuda.synchronize()
    start.record()
    for _ in range(REPLAYS):
        backend.run(inputs)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / REPLAYS


def measure_precision(
    config: ModelConfig, precision: str, folder: Path, bandwidth: Bandwidth, scenarios: Sequence[tuple[int, int]]
) -> Iterator[Measurement]:
    model = Model(config, precision, folder)
    print(HEADER, flush=True)
    tables = []
    steps = [*((*scenario, 1) for scenario in scenarios), (1, 2048, DRAFT_STEP_ROWS)]
    # All times first: the profiler slows the host down for the rest of the process.
    times = {step: model.step_ms(*step) for step in steps}
    for batch, context, rows in steps:
        measured, kernels = model.measure(batch, context, rows, times[batch, context, rows], bandwidth)
        print(measured, flush=True)
        if (batch, context) in TABLES:
            tables.append(f"{precision}, batch {batch}, context {context}, {rows} rows a sequence\n{kernels}\n")
        yield measured
    print("\n".join(["", *tables]), flush=True)


def exceeded_bars(measured: list[Measurement]) -> list[str]:
    by_place = {(each.precision, each.batch, each.context): each for each in measured if each.rows == 1}
    wrong = []
    short = by_place.get(("nvfp4", 1, 2048))
    if short is not None and short.step_ms > FLOOR_BAR * short.floor_ms:
        wrong.append(
            f"nvfp4 at 2,048 tokens takes {short.step_ms / short.floor_ms:.2f} times its floor, over {FLOOR_BAR}"
        )
    for precision in PRECISIONS:
        pair = [by_place.get((precision, 1, context)) for context in (2048, 200_000)]
        if pair[0] and pair[1] and pair[1].step_ms > LONG_CONTEXT_BAR * pair[0].step_ms:
            ratio = pair[1].step_ms / pair[0].step_ms
            wrong.append(f"{precision} at 200,000 tokens takes {ratio:.2f} times 2,048 tokens, over {LONG_CONTEXT_BAR}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Decode with the full-size model and random weights on this GPU.")
    parser.add_argument("config", type=Path)
    parser.add_argument("--precision", choices=PRECISIONS, action="append", help="default: all")
    parser.add_argument("--quick", action="store_true", help="leave out the scenarios that no bar is about")
    args = parser.parse_args()
    config, precisions = ModelConfig.from_file(args.config), args.precision or list(PRECISIONS)
    bandwidth = measure_bandwidth()
    print(f"{torch.cuda.get_device_name()}: {bandwidth}", flush=True)
    measured: list[Measurement] = []
    scenarios = QUICK_SCENARIOS if args.quick else SCENARIOS
    with tempfile.TemporaryDirectory() as root:
        folders = make_programs(args.config, precisions, LIMITS, Path(root))
        for precision, folder in folders.items():
            for each in measure_precision(config, precision, folder, bandwidth, scenarios):
                append_result("decode_full_size", {**asdict(each), **asdict(bandwidth)})
                measured.append(each)
            gc.collect()
            torch.cuda.empty_cache()
    print("\n".join([HEADER, *map(str, measured), NOTES]))
    print(f"{torch.cuda.max_memory_allocated() / 2**30:.1f} GiB of the GPU were in use")
    wrong = exceeded_bars(measured)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
