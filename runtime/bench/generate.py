"""Times of `LLM.generate` with sampling, from prompts to texts."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from qwen4exp_trt.runtime.bench.cases import DecodeCase, Effort, GenerateCase, new_tokens
from qwen4exp_trt.runtime.bench.decode import measure_decode
from qwen4exp_trt.runtime.bench.loaded import LoadedBundle
from qwen4exp_trt.runtime.bench.spread import Spread
from qwen4exp_trt.runtime.outputs import RequestOutput
from qwen4exp_trt.runtime.sampling_params import SamplingParams

SAMPLING = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}
"""Of every request."""


@dataclass(frozen=True)
class GenerateTimes:
    """Of one case. Prompts are prefilled in the steps of the first ones."""

    seconds: Spread
    """Of one call."""
    output_tokens_per_second: Spread
    """Of all sequences together."""
    first_token_ms: Spread
    """Of each request."""
    between_tokens_ms: Spread
    """The mean of each request; with drafts a step gives several tokens."""
    accepted_drafts: float | None
    """Of those that were proposed, the share; None without drafts."""
    device_step_ms: Spread | None
    """Of the GPU alone for a step in the middle of the outputs; None without a GPU, with drafts, or where there is no
    room for it."""
    host_ms: float | None
    """What a token takes beside that: sampling parameters, text, scheduling, and waiting for the GPU."""


def measure_generate(
    bundle: LoadedBundle, case: GenerateCase, effort: Effort, clock: Callable[[], float] = time.perf_counter
) -> GenerateTimes:
    """Calls behind a first one, which is not counted."""
    core = bundle.llm.core
    drafting = core.drafting
    core.drafting = drafting if case.with_drafts else None
    try:
        _generate(bundle, case)
        seconds, outputs, begin = list[float](), list[RequestOutput](), clock()
        while len(seconds) < effort.runs and (not seconds or clock() - begin < effort.seconds):
            start = clock()
            outputs += _generate(bundle, case)
            seconds.append(clock() - start)
    finally:
        core.drafting = drafting
    return _times(case, seconds, outputs, _device_step_ms(bundle, case, effort))


def _device_step_ms(bundle: LoadedBundle, case: GenerateCase, effort: Effort) -> Spread | None:
    context = case.prompt + case.output // 2
    if not bundle.is_gpu or case.with_drafts or context + new_tokens(effort, 1) > bundle.limits.max_seq_len:
        return None
    device = measure_decode(bundle, DecodeCase(case.batch, context), effort).device
    return None if device is None else device.step_ms


def _generate(bundle: LoadedBundle, case: GenerateCase) -> list[RequestOutput]:
    prompts = [{"prompt_token_ids": bundle.random_ids(case.prompt)} for _ in range(case.batch)]
    common = SamplingParams(**SAMPLING, max_tokens=case.output, ignore_eos=True)
    return bundle.llm.generate(prompts, [replace(common, seed=seed) for seed in range(case.batch)])


def _times(
    case: GenerateCase, seconds: list[float], outputs: list[RequestOutput], device: Spread | None
) -> GenerateTimes:
    metrics = [output.metrics for output in outputs]
    first = [1e3 * each.time_to_first_token for each in metrics if each.time_to_first_token is not None]
    between = [1e3 * each.mean_inter_token_latency for each in metrics if each.mean_inter_token_latency is not None]
    drafted = sum(each.num_draft_tokens for each in metrics)
    between_tokens = Spread.of(between)
    return GenerateTimes(
        seconds=Spread.of(seconds),
        output_tokens_per_second=Spread.of([case.batch * case.output / each for each in seconds]),
        first_token_ms=Spread.of(first),
        between_tokens_ms=between_tokens,
        accepted_drafts=sum(each.num_accepted_tokens for each in metrics) / drafted if drafted else None,
        device_step_ms=device,
        host_ms=None if device is None else between_tokens.median - device.median,
    )
