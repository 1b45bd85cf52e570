"""Prefills with the full-size model on the GPU at hand: random weights and prompts, the serving loop of the runtime.

    python benchmarks/prefill_full_size.py tests/fixtures/released_config.json

Prints for each size of a chunk and length of the prompt the time to the first token beside what the prompt's arithmetic
takes at the rate of cuBLAS in this run, and tables of the kernels of one chunk. Appends a line for each measurement to
``benchmarks/results/prefill_full_size.jsonl``, and exits with 1 when a bar is missed. Random keys select other groups
for each query, which is the worst that sparse attention can meet.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from full_size_model import PRECISIONS, FullSizeModel, make_programs
from kernel_table import Kernels, profile_kernels
from results_file import append_result

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.plugins.cost import StepSize
from qwen4exp_trt.runtime.bench.filled_states import fill_states
from qwen4exp_trt.runtime.bench.rates import measure_matmul_rate
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.scheduler import ScheduledSequence
from qwen4exp_trt.runtime.step_costs import step_cost
from qwen4exp_trt.runtime.step_inputs import build_step_inputs

PROMPTS, CHUNKS = (2048, 8192, 32_768, 131_072, 262_144), (2048, 8192)
QUICK_PROMPTS, QUICK_CHUNKS = (2048, 8192), (8192,)
TABLE_CONTEXTS = (0, 131_072)
"""Tokens before the chunk whose kernels are listed."""
LIMITS = EngineLimits(max_batch_size=1, max_seq_len=max(PROMPTS) + 64, prefill_chunk=max(CHUNKS), block_size=64)
RATE_BAR, LONG_PROMPT_BAR = 10_000, 0.5
"""Tokens a second that a prompt of 8,192 tokens reaches with nvfp4, and the share of that rate at 131,072."""


@dataclass(frozen=True)
class Measurement:
    """One line of the result."""

    precision: str
    chunk: int
    prompt: int
    first_token_ms: float
    """From the request to the sampled token on the host. Of a prompt that is the start of a longer one (``is_start``):
    to the end of its last chunk on the GPU."""
    is_start: bool
    tokens_per_second: float
    host_ms: float | None
    """Of the host for the first chunk, which finds the GPU idle; None where it waits for the token as well."""
    flops: int
    floor_ms: float
    peak_bytes: int

    def __str__(self) -> str:
        return (
            f"{self.precision:<11}{self.chunk:>6}{self.prompt:>8}{self.first_token_ms:>11.1f}"
            f"{self.tokens_per_second:>10.0f}{self.flops / self.prompt / 1e9:>9.2f}{self.floor_ms:>10.1f}"
            f"{self.first_token_ms / self.floor_ms:>7.2f}"
            f"{'' if self.host_ms is None else f'{self.host_ms:.1f}':>9}{self.peak_bytes / 2**30:>9.1f}"
            f"{'  start of a longer one' if self.is_start else ''}"
        )


HEADER = (
    f"{'precision':<11}{'chunk':>6}{'prompt':>8}{'token 1 ms':>11}{'tokens/s':>10}{'GFLOP/t':>9}{'floor ms':>10}"
    f"{'x floor':>7}{'host ms':>9}{'GiB':>9}"
)
NOTES = "floor: the prompt's products at the rate of cuBLAS above; host ms: Python's, first chunk; GiB: the most in use"


@dataclass(frozen=True)
class Run:
    """One request: milliseconds from its start until each chunk had ended on the GPU, and until the token was there."""

    chunk_ends: list[float]
    first_token: float
    host: float | None


class Model(FullSizeModel):
    """What prefills random prompts."""

    def __init__(self, config: ModelConfig, precision: str, folder: Path, longest: int) -> None:
        super().__init__(config, precision, folder, LIMITS, longest // LIMITS.block_size + 1)
        self.generator = torch.Generator().manual_seed(0)

    def prefill(self, prompt: int, chunk: int) -> Run:
        core = self.core_within(replace(LIMITS, prefill_chunk=chunk))
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        ids = self.random_prompt(prompt, self.generator).tolist()
        torch.cuda.synchronize()
        events, host, start = [torch.cuda.Event(enable_timing=True)], [], time.perf_counter()
        events[0].record()
        sequence = core.make_sequence(None, ids, params)
        core.add(sequence)
        while sequence.finish_reason is None:
            begin = time.perf_counter()
            core.step()
            host.append(time.perf_counter() - begin)
            events.append(torch.cuda.Event(enable_timing=True))
            events[-1].record()
        first_token = time.perf_counter() - start
        torch.cuda.synchronize()
        ends = [events[0].elapsed_time(event) for event in events[1:]]
        return Run(ends, 1e3 * first_token, 1e3 * host[0] if len(host) > 1 else None)

    def chunk_kernels(self, chunk: int, context: int) -> Kernels:
        """Of a chunk behind ``context`` tokens."""
        fill_states(self.backend.states, context, self.config.vocab_size)
        ids = self.random_prompt(context + chunk, self.generator)
        sequence = self.core.make_sequence(None, ids, SamplingParams(temperature=0, max_tokens=1))
        assert self.core.scheduler.acquire_memory(sequence)
        self.core.states.commit(sequence, context)
        inputs, _ = build_step_inputs([ScheduledSequence(sequence, chunk)])
        self.core.scheduler.finish(sequence)
        return profile_kernels(lambda: self.backend.run(inputs), rounds=1)

    def measure(self, prompts: Sequence[int], chunk: int, rate: float) -> Iterator[Measurement]:
        """Each prompt alone, but those between 32,768 and the longest as the start of that one."""
        self.prefill(min(prompts), chunk)
        self.prefill(chunk + 1, chunk)
        longest = max(prompts)
        for prompt in prompts:
            if prompt > 32_768 and prompt < longest:
                continue
            torch.cuda.reset_peak_memory_stats()
            run = self.prefill(prompt, chunk)
            yield self._measurement(prompt, chunk, run, rate, run.first_token, is_start=False)
            if prompt == longest:
                for start in (start for start in prompts if 32_768 < start < longest and start % chunk == 0):
                    ended = run.chunk_ends[start // chunk - 1]
                    yield self._measurement(start, chunk, run, rate, ended, is_start=True)

    def _measurement(
        self, prompt: int, chunk: int, run: Run, rate: float, milliseconds: float, is_start: bool
    ) -> Measurement:
        flops = step_cost(self.program, StepSize(1, prompt, 0)).flops
        return Measurement(
            precision=self.precision,
            chunk=chunk,
            prompt=prompt,
            first_token_ms=milliseconds,
            is_start=is_start,
            tokens_per_second=1e3 * prompt / milliseconds,
            host_ms=run.host,
            flops=flops,
            floor_ms=1e3 * flops / rate,
            peak_bytes=torch.cuda.max_memory_allocated(),
        )


def measure_precision(
    config: ModelConfig, precision: str, folder: Path, args: argparse.Namespace, rate: float
) -> Iterator[Measurement]:
    model = Model(config, precision, folder, max(*args.prompt, *args.context) + max(args.chunk) + 1)
    print(HEADER, flush=True)
    for chunk in args.chunk:
        for measured in model.measure(args.prompt, chunk, rate):
            print(measured, flush=True)
            yield measured
    for context in args.context:
        for chunk in args.chunk:
            kernels = model.chunk_kernels(chunk, context)
            print(f"\n{precision}, a chunk of {chunk} tokens behind {context}\n{kernels}", flush=True)


def missed_bars(measured: list[Measurement]) -> list[str]:
    rates = {(each.chunk, each.prompt): each.tokens_per_second for each in measured if each.precision == "nvfp4"}
    wrong = []
    short = max((rate for (_, prompt), rate in rates.items() if prompt == 8192), default=RATE_BAR)
    if short < RATE_BAR:
        wrong.append(f"8,192 tokens are prefilled at {short:,.0f} tokens/s, below {RATE_BAR:,}")
    for chunk in {chunk for chunk, _ in rates}:
        pair = [rates.get((chunk, prompt)) for prompt in (8192, 131_072)]
        if pair[0] and pair[1] and pair[1] < LONG_PROMPT_BAR * pair[0]:
            drop = f"{pair[1]:,.0f} tokens/s at 131,072 tokens, below {LONG_PROMPT_BAR} of {pair[0]:,.0f} at 8,192"
            wrong.append(f"chunks of {chunk}: {drop}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Prefill with the full-size model and random weights on this GPU.")
    parser.add_argument("config", type=Path)
    parser.add_argument("--precision", choices=PRECISIONS, action="append", help="default: nvfp4")
    parser.add_argument("--chunk", type=int, action="append", help=f"default: {CHUNKS}")
    parser.add_argument("--prompt", type=int, action="append", help=f"default: {PROMPTS}")
    parser.add_argument("--context", type=int, action="append", help=f"of the tables; default: {TABLE_CONTEXTS}")
    parser.add_argument("--quick", action="store_true", help=f"prompts of {QUICK_PROMPTS}, chunks of {QUICK_CHUNKS}")
    args = parser.parse_args()
    args.chunk = args.chunk or (QUICK_CHUNKS if args.quick else CHUNKS)
    args.prompt = args.prompt or (QUICK_PROMPTS if args.quick else PROMPTS)
    args.context = TABLE_CONTEXTS if args.context is None else args.context
    config, rate = ModelConfig.from_file(args.config), measure_matmul_rate()
    print(f"{torch.cuda.get_device_name()}: cuBLAS multiplies BF16 at {rate / 1e12:,.0f} TFLOP/s", flush=True)
    measured: list[Measurement] = []
    with tempfile.TemporaryDirectory() as root:
        folders = make_programs(args.config, args.precision or PRECISIONS[:1], LIMITS, Path(root))
        for precision, folder in folders.items():
            for each in measure_precision(config, precision, folder, args, rate):
                append_result("prefill_full_size", {**asdict(each), "matmul_flops": rate})
                measured.append(each)
            gc.collect()
            torch.cuda.empty_cache()
    print("\n".join(["", HEADER, *map(str, measured), NOTES]))
    wrong = missed_bars(measured)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
