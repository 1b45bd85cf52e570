"""Thousands of requests of random lengths, priorities and parameters, whose clients go away when they like.

Pages are few, so sequences are preempted; the tiers of the prefix cache are small, so they evict.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import bundles
import pytest
from bundles import DEMO_CHECKPOINT, HELDOUT_TEXT
from soak import CLIENTS, LIMITS, NUM_BLOCKS, Referee, Request, Service, Workload, resident_bytes
from tiny_tokenizer import tiny_backend

from qwen4exp_trt.runtime import LLM, AsyncLLM
from qwen4exp_trt.runtime.tokenizer import Tokenizer

MIB = 2**20

MTP, NGRAM, NONE = {"speculate": "mtp:3"}, {"speculate": "ngram:4"}, {}
ROUND = 500
"""Requests between two looks at memory."""

STOP_STRINGS = (" the", "e, a", ".\n", "she w", "and", "ing ", "; ", '"')
"""Some are within a token of the demo, some across two."""


@pytest.fixture(scope="module")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("soak")
    return bundles.build(bundles.tiny_checkpoint(folder / "checkpoint"), folder / "tiny", **LIMITS)


@pytest.fixture(scope="module")
def demo_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.build(DEMO_CHECKPOINT, tmp_path_factory.mktemp("soak") / "demo", **LIMITS)


def heldout_requests(count: int, seed: int) -> Iterator[Request]:
    tokenizer = Tokenizer.from_dir(DEMO_CHECKPOINT)
    assert tokenizer is not None
    text = tokenizer.encode(HELDOUT_TEXT.read_text(encoding="utf-8")[:20_000], add_special_tokens=False)
    return islice(Workload(text, tokenizer.vocab_size, STOP_STRINGS, seed), count)


def random_requests(count: int, seed: int) -> Iterator[Request]:
    rng = random.Random(seed)
    text = [rng.randrange(bundles.IM_END + 1, bundles.VOCAB_SIZE) for _ in range(3000)]
    return islice(Workload(text, tiny_backend().get_vocab_size(), ("e", "th", "1", " a"), seed), count)


def run_traffic(service: Service, requests: list[Request], referee: Referee, every: int, exact_samples: bool) -> None:
    """Serve the requests in rounds. Each ends idle, and after the first two the process grows no more."""
    rounds = [requests[start : start + ROUND] for start in range(0, len(requests), ROUND)]
    resident = []
    for number, some in enumerate(rounds):
        answers = service.serve(some, CLIENTS)
        service.check_idle()
        for place, answer in enumerate(answers):
            if answer.num_preemptions or place % every == number % every:
                referee.check(answer, exact_samples)
        del answers
        resident.append(resident_bytes())
    service.check_pages()
    if isinstance(service.llm, AsyncLLM):  # the threads' requests have no priorities and seldom make each other wait
        assert service.count("num_preemptions") > len(requests) / 200
    growth = resident[-1] - resident[min(1, len(resident) - 1)]
    assert growth < 64 * MIB, [f"{size / MIB:.0f} MiB" for size in resident]


def test_three_hundred_requests(tiny_bundle: Path, tmp_path: Path) -> None:
    options = {"host_cache_bytes": MIB, "cache_dir": tmp_path / "cache", "snapshot_interval": 8, **NGRAM}
    service = Service(AsyncLLM(tiny_bundle, num_blocks=NUM_BLOCKS, **options))
    run_traffic(service, list(random_requests(300, seed=0)), Referee(tiny_bundle), every=6, exact_samples=False)
    assert service.count("spec_decode_num_accepted_tokens") > 0


@pytest.mark.slow
@pytest.mark.time_limit(1800)
@pytest.mark.parametrize(
    ("count", "drafts", "is_async"),
    [(4000, MTP, True), (3000, NGRAM, True), (3000, NONE, False)],
    ids=["mtp-async", "ngram-async", "threads"],
)
def test_ten_thousand_requests(
    demo_bundle: Path, tmp_path: Path, count: int, drafts: dict[str, Any], is_async: bool
) -> None:
    kind = AsyncLLM if is_async else LLM
    tiers = {"host_cache_bytes": 4 * MIB, "cache_dir": tmp_path / "cache", "disk_cache_bytes": 16 * MIB}
    service = Service(kind(demo_bundle, num_blocks=NUM_BLOCKS, snapshot_interval=8, **tiers, **drafts))
    requests = list(heldout_requests(count, seed=count))
    run_traffic(service, requests, Referee(demo_bundle), every=20, exact_samples=not drafts)
    assert service.count("prefix_cache_successful_lookups") > count / 10
