from __future__ import annotations

from collections.abc import Mapping

import pytest
from counting_backend import VOCAB_SIZE, CountingBackend
from torch import Tensor

from qwen4exp_trt.runtime import RequestMetrics, SamplingParams
from qwen4exp_trt.runtime.engine_core import EngineCore
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.metrics import EngineMetrics, HistogramValue, Metric, gauge


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def metrics(clock: FakeClock) -> EngineMetrics:
    return EngineMetrics(clock)


def collected(metrics: EngineMetrics) -> dict[str, Metric]:
    return {metric.name.removeprefix("qwen4exp_"): metric for metric in metrics.collect()}


def values(metric: Metric) -> dict[tuple[str, ...], float | HistogramValue]:
    return {tuple(sample.labels.values()): sample.value for sample in metric.samples}


def histogram(metrics: EngineMetrics, name: str) -> tuple[int, float]:
    """How many observations, and their sum."""
    (value,) = values(collected(metrics)[name]).values()
    assert isinstance(value, HistogramValue)
    return value.buckets[-1][1], value.sum


def test_times_of_a_request(metrics: EngineMetrics, clock: FakeClock) -> None:
    request = metrics.request()
    assert request == RequestMetrics(arrival_time=100.0)
    assert (request.queue_time, request.time_to_first_token, request.e2e_latency) == (None, None, None)
    clock.now = 102.0
    metrics.scheduled(request)
    clock.now = 103.0
    metrics.scheduled(request)
    metrics.produced(request, 1, 105.0)
    assert (request.queue_time, request.time_to_first_token) == (2.0, 5.0)
    assert (request.mean_inter_token_latency, request.max_inter_token_latency) == (None, 0.0)
    metrics.produced(request, 3, 106.5)
    metrics.produced(request, 1, 107.0)
    clock.now = 108.0
    metrics.finished(request, "stop", 7)
    clock.now = 109.0
    metrics.finished(request, "abort", 7)
    assert (request.mean_inter_token_latency, request.max_inter_token_latency) == (0.5, 1.5)
    assert (request.e2e_latency, request.num_output_tokens) == (8.0, 5)
    assert values(collected(metrics)["request_success"]) == {("stop",): 1}, "a request ends once"
    assert histogram(metrics, "request_queue_time_seconds") == (1, 2.0)
    assert histogram(metrics, "time_to_first_token_seconds") == (1, 5.0)
    assert histogram(metrics, "inter_token_latency_seconds") == (4, 2.0)
    assert histogram(metrics, "e2e_request_latency_seconds") == (1, 8.0)
    assert histogram(metrics, "request_prompt_tokens") == (1, 7.0)
    assert histogram(metrics, "request_generation_tokens") == (1, 5.0)


def test_counts_of_a_request(metrics: EngineMetrics) -> None:
    first, second = metrics.request(), metrics.request()
    metrics.cached(first, 10, 8)
    metrics.cached(second, 5, 0)
    metrics.drafted(first, 3, 2)
    metrics.drafted(first, 3, 0)
    metrics.preempted(second)
    metrics.stepped(0.5, 12)
    assert (first.num_cached_tokens, first.num_draft_tokens, first.num_accepted_tokens) == (8, 6, 2)
    assert (second.num_cached_tokens, second.num_preemptions) == (0, 1)
    totals = {name: values(metric).get(()) for name, metric in collected(metrics).items() if metric.kind == "counter"}
    assert totals == {
        "request_success": None,
        "prompt_tokens": 12,
        "generation_tokens": 0,
        "num_preemptions": 1,
        "prefix_cache_queries": 15,
        "prefix_cache_hits": 8,
        "spec_decode_num_draft_tokens": 6,
        "spec_decode_num_accepted_tokens": 2,
        "spec_decode_num_drafts": 2,
    }
    assert histogram(metrics, "engine_step_seconds") == (1, 0.5)


def test_buckets_count_what_is_up_to_their_bound(metrics: EngineMetrics) -> None:
    for seconds in (0.001, 0.0011, 0.5, 1e6):
        metrics.stepped(seconds, 0)
    (value,) = values(collected(metrics)["engine_step_seconds"]).values()
    assert isinstance(value, HistogramValue)
    counts = dict(value.buckets)
    assert [counts[bound] for bound in (0.001, 0.0025, 0.25, 0.5, 300.0, float("inf"))] == [1, 2, 2, 3, 3, 4]


def test_sources_are_asked_each_time(metrics: EngineMetrics) -> None:
    sizes = [1.0, 2.0]
    metrics.add_source(lambda: [gauge("size", "Of something.", sizes.pop(0))])
    found = [collected(metrics)["size"] for _ in range(2)]
    assert [(metric.kind, values(metric)) for metric in found] == [("gauge", {(): 1.0}), ("gauge", {(): 2.0})]


def test_the_engine_stamps_its_requests(metrics: EngineMetrics, clock: FakeClock) -> None:
    """One of two can run; each step takes two seconds."""

    class TimedBackend(CountingBackend):
        def run(self, inputs: Mapping[str, Tensor]) -> Tensor:
            clock.now += 2
            return super().run(inputs)

    limits = EngineLimits(max_batch_size=1, max_seq_len=32, prefill_chunk=8, block_size=4)
    core = EngineCore(TimedBackend(), limits, 8, VOCAB_SIZE, (), None, metrics=metrics)
    first, second = (
        core.make_sequence(None, prompt, SamplingParams(temperature=0, max_tokens=count))
        for prompt, count in ((range(1, 13), 3), ([1], 2))
    )
    clock.now += 1
    core.add(first)
    core.add(second)
    while core.scheduler.num_unfinished:
        core.step()
    of_first, of_second = first.request_output().metrics, second.request_output().metrics
    assert (of_first.queue_time, of_first.time_to_first_token, of_first.e2e_latency) == (1, 5, 9), (
        "a prompt of two steps"
    )
    assert (of_first.mean_inter_token_latency, of_first.max_inter_token_latency) == (2, 2)
    assert (of_second.queue_time, of_second.time_to_first_token, of_second.e2e_latency) == (9, 11, 13)
    assert histogram(metrics, "engine_step_seconds") == (6, 12)
    assert values(collected(metrics)["prompt_tokens"]) == {(): 13}
    assert values(collected(metrics)["request_success"]) == {("length",): 2}
