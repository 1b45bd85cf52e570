"""Times to the first token of prompts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from qwen4exp_trt.runtime.bench.cases import Effort, PrefillCase
from qwen4exp_trt.runtime.bench.loaded import LoadedBundle, Marks, check_sequences
from qwen4exp_trt.runtime.bench.spread import Spread

Clock = Callable[[], float]


@dataclass(frozen=True)
class PrefillTimes:
    """Of one case."""

    first_run_ms: float
    """Of a prompt of up to two chunks before those that count: with what is compiled or chosen then."""
    first_token_ms: Spread
    """From the request to the sampled token on the host."""
    chunks: tuple[int, ...]
    """Tokens of the steps of a prompt."""
    last_chunk_ms: float | None
    """On the GPU, of the last run's last step; None without a GPU."""
    enqueue_ms: float | None
    """Of the host for the last run's first step; None where that is the last step as well, for which the host waits."""
    peak_bytes: int | None
    """The most that torch had allocated on the GPU."""


@dataclass(frozen=True)
class _Run:
    seconds: float
    chunks: tuple[int, ...]
    host_seconds: list[float]
    gpu_seconds: list[float] | None


def measure_prefill(
    bundle: LoadedBundle, case: PrefillCase, effort: Effort, clock: Clock = time.perf_counter
) -> PrefillTimes:
    """Prompts of random ids, one after another; `BundleError` if one was dropped, as logits were not finite."""
    if bundle.is_gpu:
        torch.cuda.reset_peak_memory_stats(bundle.device)
    first = _prefill(bundle, min(case.prompt, 2 * bundle.limits.prefill_chunk), clock)
    runs, begin = list[_Run](), clock()
    while len(runs) < effort.runs:
        is_over = clock() - begin > effort.seconds
        if runs and is_over and (len(runs) >= effort.least or runs[0].seconds > effort.seconds):
            break
        runs.append(_prefill(bundle, case.prompt, clock))
    last = runs[-1]
    return PrefillTimes(
        first_run_ms=1e3 * first.seconds,
        first_token_ms=Spread.of([1e3 * run.seconds for run in runs]),
        chunks=last.chunks,
        last_chunk_ms=1e3 * last.gpu_seconds[-1] if last.gpu_seconds else None,
        enqueue_ms=1e3 * last.host_seconds[0] if len(last.chunks) > 1 else None,
        peak_bytes=torch.cuda.max_memory_allocated(bundle.device) if bundle.is_gpu else None,
    )


def _prefill(bundle: LoadedBundle, prompt: int, clock: Clock) -> _Run:
    core, ids = bundle.core(), bundle.random_ids(prompt)
    marks = Marks(bundle.device) if bundle.is_gpu else None
    bundle.synchronize()
    if marks is not None:
        marks.mark()
    host, chunks, start = list[float](), list[int](), clock()
    (sequence,) = bundle.add(core, [ids], most=1)
    while sequence.finish_reason is None and sequence.error is None:
        begin, computed = clock(), sequence.num_computed
        core.step()
        host.append(clock() - begin)
        # A sequence that has ended has no memory, and nothing that is computed.
        chunks.append((sequence.num_computed or prompt) - computed)
        if marks is not None:
            marks.mark()
    seconds = clock() - start
    core.abort(sequence)
    check_sequences([sequence])
    return _Run(seconds, tuple(chunks), host, None if marks is None else marks.seconds())
