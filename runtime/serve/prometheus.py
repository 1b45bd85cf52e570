"""``GET /metrics``: the engine's metrics and the server's own, in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from qwen4exp_trt.runtime.metrics import PREFIX, HistogramValue, Metric


class ServerMetrics(Collector):
    """Collects ``engine_metrics`` whenever it is asked; counts what the server answers."""

    def __init__(self, engine_metrics: Callable[[], Sequence[Metric]]) -> None:
        self._engine_metrics = engine_metrics
        self._responses: Counter[tuple[str, int]] = Counter()
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def answered(self, path: str, status: int) -> None:
        """Count an answer. ``path`` is one of the server's own, so that the number of them is bounded."""
        self._responses[path, status] += 1

    def text(self) -> bytes:
        """The text format, version 0.0.4."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Family]:
        return ()  # nothing is to be collected when the collector is registered

    def collect(self) -> Iterator[Family]:
        yield from map(_family, self._engine_metrics())
        text = "Answers by path and status; 499 are clients that left before the answer."
        answers = CounterMetricFamily(f"{PREFIX}http_responses", text, labels=("path", "status"))
        for (path, status), count in self._responses.items():
            answers.add_metric((path, str(status)), count)
        yield answers


def _family(metric: Metric) -> Family:
    labels = list(metric.samples[0].labels) if metric.samples else []
    kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
    family = kinds[metric.kind](metric.name, metric.documentation, labels=labels)
    for sample in metric.samples:
        values = [sample.labels[label] for label in labels]
        if isinstance(sample.value, HistogramValue):
            buckets = [(floatToGoString(bound), float(count)) for bound, count in sample.value.buckets]
            family.add_metric(values, buckets, sum_value=sample.value.sum)
        else:
            family.add_metric(values, sample.value)
    return family
