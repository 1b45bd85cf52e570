"""What a prefix cache measures, in Prometheus' terms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from qwen4exp_trt.runtime.metrics import PREFIX, Metric, Sample
from qwen4exp_trt.runtime.prefix_cache.cache import TIERS, PrefixCache
from qwen4exp_trt.runtime.prefix_cache.disk_store import DiskCounters


def cache_metrics(cache: PrefixCache) -> Iterator[Metric]:
    """Counters since the start, and the bytes that each tier holds now."""
    counters, tiers = cache.counters, cache.tiers
    disk = DiskCounters() if tiers.store is None else tiers.store.counters
    evicted = (tiers.counters.evicted_from_device, tiers.counters.evicted_from_host, disk.evicted)
    yield _counter("lookups", "Sequences that started, or went on after a preemption.", {"": counters.lookups})
    hits = {**counters.hits_by_tier}
    yield _counter("successful_lookups", "Those that restored a prefix, by where its snapshot was.", hits)
    yield _counter("hit_tokens", "Tokens that were restored, by where their pages were.", {**counters.hit_tokens})
    yield _counter("evictions", "Pages and snapshots that a tier had no room for.", _by_tier(evicted))
    yield _counter("blobs_written", "Pages and snapshots written to disk.", {"": disk.written})
    yield _counter("blobs_dropped", "Those that were not, since the disk was too slow.", {"": disk.dropped})
    yield _counter("blob_write_errors", "Those that could not be written.", {"": disk.write_errors})
    yield _counter("blobs_refused", "Those on disk that were damaged or of something else.", {"": disk.damaged})
    failed = tiers.counters.failed_copies
    yield _counter("failed_copies", "Pages and snapshots that were not moved for lack of memory.", {"": failed})
    sizes = _by_tier([tiers.bytes_of(tier) for tier in TIERS])
    yield Metric(f"{PREFIX}prefix_cache_bytes", "gauge", "What a tier holds.", _samples(sizes))


def _by_tier(values: list[int] | tuple[int, ...]) -> dict[str, int]:
    return dict(zip(TIERS, values, strict=True))


def _counter(name: str, documentation: str, values: Mapping[str, int]) -> Metric:
    return Metric(f"{PREFIX}prefix_cache_{name}", "counter", documentation, _samples(values))


def _samples(values: Mapping[str, int]) -> list[Sample]:
    return [Sample({"tier": tier} if tier else {}, value) for tier, value in values.items()]
