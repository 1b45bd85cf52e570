"""What is measured while serving: of each request, and of the engine in Prometheus' terms.

Times are seconds of a monotonic clock: differences of them have a meaning, they themselves have none.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

Clock = Callable[[], float]

PREFIX = "qwen4exp_"

_LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKEN_BUCKETS = tuple(float(4**power) for power in range(11))


@dataclass
class RequestMetrics:
    """One request, up to now.

    ``arrival_time``: when it was made. ``first_scheduled_time``: when a step first took tokens of it.
    ``first_token_time``, ``last_token_time``: when its first and so far last output tokens were there.
    ``finished_time``: when it ended or was dropped. None for what has not happened. ``num_output_tokens`` counts what
    was sampled, ``num_cached_tokens`` the tokens of the prompt that a prefix cache had, ``num_draft_tokens`` what was
    proposed for verification and ``num_accepted_tokens`` what of it was right; ``num_preemptions`` how often it lost
    its memory to others. ``max_inter_token_latency``: the longest time between two steps that gave it tokens, 0 with
    fewer than two.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_preemptions: int = 0
    max_inter_token_latency: float = 0.0

    @property
    def queue_time(self) -> float | None:
        """Seconds from the arrival to the first step."""
        return _between(self.arrival_time, self.first_scheduled_time)

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from the arrival to the first output token."""
        return _between(self.arrival_time, self.first_token_time)

    @property
    def mean_inter_token_latency(self) -> float | None:
        """Seconds for an output token after the first; None with fewer than two tokens."""
        if self.num_output_tokens < 2:
            return None
        spent = _between(self.first_token_time, self.last_token_time)
        return None if spent is None else spent / (self.num_output_tokens - 1)

    @property
    def e2e_latency(self) -> float | None:
        """Seconds from the arrival to the end."""
        return _between(self.arrival_time, self.finished_time)


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else end - start


@dataclass(frozen=True)
class HistogramValue:
    """``buckets``: (upper bound, observations up to it) in rising order, the last bound is infinite."""

    buckets: list[tuple[float, int]]
    sum: float


@dataclass(frozen=True)
class Sample:
    """A value under labels."""

    labels: Mapping[str, str]
    value: float | HistogramValue


@dataclass(frozen=True)
class Metric:
    """A Prometheus metric. The name of a counter has no ``_total``; its exposition adds it."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    documentation: str
    samples: Sequence[Sample]


@dataclass
class Counter:
    """A number that only grows, for each value of one label (None: it has no label)."""

    name: str
    documentation: str
    label: str | None = None
    _values: defaultdict[str, float] = field(default_factory=lambda: defaultdict(int))

    def __post_init__(self) -> None:
        if self.label is None:
            self._values[""] = 0

    def add(self, amount: float = 1, value: str = "") -> None:
        """Count ``amount`` under the label's ``value``."""
        self._values[value] += amount

    def total(self) -> float:
        """Over all values of the label."""
        return sum(list(self._values.values()))

    def collect(self) -> Metric:
        values = self._values.copy()
        samples = [Sample({self.label: value} if self.label else {}, count) for value, count in values.items()]
        return Metric(PREFIX + self.name, "counter", self.documentation, samples)


class Histogram:
    """Observations by upper ``bounds``, which rise."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float] = _LATENCY_BUCKETS) -> None:
        self.name, self.documentation, self._bounds = name, documentation, (*bounds, float("inf"))
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Take ``value``, ``count`` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def collect(self) -> Metric:
        cumulative = accumulate(self._counts.copy())
        value = HistogramValue(list(zip(self._bounds, cumulative, strict=True)), self._sum)
        return Metric(PREFIX + self.name, "histogram", self.documentation, [Sample({}, value)])


def gauge(name: str, documentation: str, value: float) -> Metric:
    """A value of this moment, for `EngineMetrics.add_source`."""
    return Metric(PREFIX + name, "gauge", documentation, [Sample({}, value)])


class EngineMetrics:
    """Of all requests of an engine, and of what else `add_source` has registered.

    The hooks are called by one thread at a time, which holds the engine's lock; `collect` by any thread, without it.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.clock = clock
        self.requests_finished = Counter("request_success", "Requests that ended, by reason.", "finished_reason")
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts that were computed.")
        self.generation_tokens = Counter("generation_tokens", "Tokens that were generated.")
        self.preemptions = Counter("num_preemptions", "Sequences that lost their memory to others.")
        self.prefix_cache_queries = Counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self.prefix_cache_hits = Counter("prefix_cache_hits", "Prompt tokens that the prefix cache had.")
        self.draft_tokens = Counter("spec_decode_num_draft_tokens", "Draft tokens that were verified.")
        self.accepted_tokens = Counter("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.")
        self.drafts = Counter("spec_decode_num_drafts", "Steps of a sequence that verified a draft.")
        self.queue_time = Histogram("request_queue_time_seconds", "From the arrival of a request to its first step.")
        self.time_to_first_token = Histogram("time_to_first_token_seconds", "From the arrival to the first token.")
        self.inter_token = Histogram("inter_token_latency_seconds", "A token's share of the time since the last step.")
        self.e2e = Histogram("e2e_request_latency_seconds", "From the arrival of a request to its end.")
        self.step_time = Histogram("engine_step_seconds", "One step of the engine.")
        self.request_prompt = Histogram("request_prompt_tokens", "Tokens of a request's prompt.", _TOKEN_BUCKETS)
        self.request_output = Histogram("request_generation_tokens", "Tokens of a request's output.", _TOKEN_BUCKETS)
        self._sources: list[Callable[[], Iterable[Metric]]] = []

    def add_source(self, source: Callable[[], Iterable[Metric]]) -> None:
        """Ask ``source`` at each `collect`; it is called by any thread and must not wait."""
        self._sources.append(source)

    def collect(self) -> list[Metric]:
        """Everything now."""
        own = [value.collect() for value in vars(self).values() if isinstance(value, Counter | Histogram)]
        return [*own, *(metric for source in self._sources for metric in source())]

    def request(self) -> RequestMetrics:
        """Of a request that arrives now."""
        return RequestMetrics(self.clock())

    def scheduled(self, request: RequestMetrics) -> None:
        """A step takes tokens of the request."""
        if request.first_scheduled_time is None:
            request.first_scheduled_time = self.clock()
            self.queue_time.observe(request.first_scheduled_time - request.arrival_time)

    def cached(self, request: RequestMetrics, num_queried: int, num_hit: int) -> None:
        """Of ``num_queried`` prompt tokens the prefix cache had ``num_hit``."""
        request.num_cached_tokens = num_hit
        self.prefix_cache_queries.add(num_queried)
        self.prefix_cache_hits.add(num_hit)

    def drafted(self, request: RequestMetrics, num_proposed: int, num_accepted: int) -> None:
        """A step verified ``num_proposed`` draft tokens of the request."""
        request.num_draft_tokens += num_proposed
        request.num_accepted_tokens += num_accepted
        self.drafts.add()
        self.draft_tokens.add(num_proposed)
        self.accepted_tokens.add(num_accepted)

    def produced(self, request: RequestMetrics, num_tokens: int, now: float) -> None:
        """A step that ended at ``now`` gave the request ``num_tokens`` output tokens, at least one."""
        if request.last_token_time is None:
            request.first_token_time = now
            self.time_to_first_token.observe(now - request.arrival_time)
        else:
            latency = now - request.last_token_time
            request.max_inter_token_latency = max(request.max_inter_token_latency, latency)
            self.inter_token.observe(latency / num_tokens, num_tokens)
        request.last_token_time = now
        request.num_output_tokens += num_tokens
        self.generation_tokens.add(num_tokens)

    def preempted(self, request: RequestMetrics) -> None:
        """The request lost its memory."""
        request.num_preemptions += 1
        self.preemptions.add()

    def finished(self, request: RequestMetrics, reason: str, num_prompt_tokens: int) -> None:
        """The request ended by ``reason``: its finish reason, or ``error``. Only the first call for it counts."""
        if request.finished_time is not None:
            return
        request.finished_time = self.clock()
        self.requests_finished.add(1, reason)
        self.e2e.observe(request.finished_time - request.arrival_time)
        self.request_prompt.observe(num_prompt_tokens)
        self.request_output.observe(request.num_output_tokens)

    def stepped(self, seconds: float, num_prompt_tokens: int) -> None:
        """A step took ``seconds`` and computed ``num_prompt_tokens`` tokens of prompts."""
        self.step_time.observe(seconds)
        self.prompt_tokens.add(num_prompt_tokens)
