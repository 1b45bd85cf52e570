"""Models with an n-gram table on disk: rows that are read ahead, files that fail, memory that stays bounded."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bundles
import pytest
from serving import assert_idle, generated, ids

from qwen4exp_trt.errors import BundleError, DroppedError
from qwen4exp_trt.runtime import LLM, AsyncLLM, SamplingParams
from qwen4exp_trt.runtime.ngram_rows import NgramRows
from qwen4exp_trt.runtime.ngram_table import TokenWindow
from qwen4exp_trt.runtime.sequence import Sequence
from qwen4exp_trt.runtime.specs import PleResidency

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = [[10 + index, 200 - index] * (5 + index) for index in range(3)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.disk_bundle(tmp_path_factory.getbasetemp())


@pytest.fixture
def llm(bundle: Path) -> Iterator[LLM]:
    """Without a cache of rows, so that each step reads what it needs."""
    llm = LLM(bundle, row_cache_bytes=0)
    yield llm
    assert_idle(llm)


@dataclass
class BadRows:
    """Reads of row files that fail: those of bytes which only ``tokens`` need."""

    places: set[tuple[int, int]]
    error: OSError | None
    """None for a file that ends there."""

    def preadv(self, descriptor: int, buffers: list[Any], offset: int) -> int:
        size = sum(map(len, buffers))
        for bad, begin in self.places:
            if os.path.sameopenfile(bad, descriptor) and offset < begin + 1 and begin < offset + size:
                if self.error is not None:
                    raise self.error
                return 0
        return PREADV(descriptor, buffers, offset)


PREADV = os.preadv


def places_of(llm: LLM, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> set[tuple[int, int]]:
    """Where the rows of a prompt are: the descriptor and the offset of each read."""
    found: set[tuple[int, int]] = set()

    def preadv(descriptor: int, buffers: list[Any], offset: int) -> int:
        found.update((descriptor, place) for place in range(offset, offset + sum(map(len, buffers))))
        return PREADV(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr("qwen4exp_trt.runtime.row_files._GAP_BYTES", 0)
        patch.setattr(os, "preadv", preadv)
        llm.generate(ids(prompt), GREEDY)
    return found


def run_all(llm: LLM, prompts: list[list[int]]) -> list[Sequence]:
    sequences = [llm.core.make_sequence(None, prompt, GREEDY) for prompt in prompts]
    for sequence in sequences:
        llm.core.add(sequence)
    while llm.core.scheduler.num_unfinished:
        llm.core.step()
    return sequences


@pytest.mark.parametrize("error", [OSError(errno.EIO, "Input/output error"), None], ids=["EIO", "truncated"])
def test_only_the_request_that_needs_the_rows_ends(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: OSError | None
) -> None:
    expected = [generated(output) for output in llm.generate([ids(prompt) for prompt in PROMPTS], GREEDY)]
    places = [places_of(llm, prompt, monkeypatch) for prompt in PROMPTS]
    only_second = places[1] - places[0] - places[2]
    assert only_second
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", BadRows(only_second, error).preadv)
        first, second, third = run_all(llm, PROMPTS)
    assert [first.error, third.error] == [None, None]
    assert [first.token_ids[len(PROMPTS[0]) :], third.token_ids[len(PROMPTS[2]) :]] == [expected[0], expected[2]]
    assert isinstance(second.error, DroppedError)
    message = str(second.error)
    assert f"request {second.request_id} was dropped: " in message and "model.safetensors: " in message
    if error is None:
        assert "it was truncated after it was opened; put it back" in message
    else:
        assert "Input/output error (EIO); look after the disk" in message
    # The disk is well again.
    assert [generated(output) for output in llm.generate([ids(prompt) for prompt in PROMPTS], GREEDY)] == expected


def test_a_file_that_is_cut_while_the_model_runs(tmp_path: Path) -> None:
    """For real: every request fails, with the file and the byte where it ends; put back, all goes on."""
    checkpoint = tmp_path / "checkpoint"
    bundles.tiny_checkpoint(checkpoint)
    (weights,) = checkpoint.glob("*.safetensors")
    bundle = bundles.build(checkpoint, tmp_path / "bundle", ple_residency=PleResidency.DISK)
    llm = LLM(bundle, row_cache_bytes=0)
    expected = generated(llm.generate(ids(PROMPTS[0]), GREEDY)[0])
    content = weights.read_bytes()
    os.truncate(weights, 100)
    with pytest.raises(DroppedError, match=r"model\.safetensors: ends at byte 100, but \d+ bytes at [\d,]+ are needed"):
        llm.generate([ids(prompt) for prompt in PROMPTS], GREEDY)
    assert_idle(llm)
    with weights.open("r+b") as file:
        file.write(content)
    assert generated(llm.generate(ids(PROMPTS[0]), GREEDY)[0]) == expected


def test_rows_of_the_next_chunk_are_read_while_a_step_runs(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt in chunks the step finds all rows but those of the first chunk; the text is the same."""
    prompt = list(range(30, 80))
    cold, llm = LLM(bundle, row_cache_bytes=0), LLM(bundle)
    rows = llm.core.backend.rows  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(rows, NgramRows)
    (table,) = rows._tables.values()
    own, read = table._reader.read, list[tuple[str, int]]()

    def recorded(ids: Any) -> Any:
        read.append((threading.current_thread().name, len(ids)))
        return own(ids)

    monkeypatch.setattr(table._reader, "read", recorded)
    params = SamplingParams(temperature=0, max_tokens=1)
    assert generated(llm.generate(ids(prompt), params)[0]) == generated(cold.generate(ids(prompt), params)[0])
    ahead = [count for name, count in read if name.startswith("ngram-rows")]
    in_step = [count for name, count in read if not name.startswith("ngram-rows")]
    assert len(ahead) >= 5 and len(in_step) == 1, "6 chunks behind the first"


def test_a_restored_prefix_brings_its_tokens_along(bundle: Path) -> None:
    """The hash of the first tokens behind it looks back at them: they are a state like others."""
    prefix = list(range(100, 132))
    prompts = [ids([*prefix, *tail]) for tail in ([7, 8, 9], [9, 8], list(range(20)))]
    plain, caching = LLM(bundle, enable_prefix_caching=False), LLM(bundle)
    expected = [generated(plain.generate(prompt, GREEDY)[0]) for prompt in prompts]
    outputs = [caching.generate(prompt, GREEDY)[0] for prompt in prompts]
    assert [generated(output) for output in outputs] == expected
    assert [output.metrics.num_cached_tokens for output in outputs] == [0, 32, 32]


def test_long_use_keeps_to_the_budget(bundle: Path) -> None:
    """Prompts of many lengths, most of whose rows are new."""
    llm = LLM(bundle, row_cache_bytes=2**14, enable_prefix_caching=False)
    rows = llm.core.backend.rows  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(rows, NgramRows)
    (table,) = rows._tables.values()
    kept, threads = table.cache_bytes, threading.active_count()
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    for length in range(1, 40):
        prompts = [[(17 * length + 5 * index + step) % 300 + 10 for index in range(length)] for step in (0, 101)]
        llm.generate([ids(prompt) for prompt in prompts], params)
        assert len(table._prefetches) <= 2
    assert 2**13 < table.cache_bytes == kept <= 2**14
    assert threading.active_count() <= threads + 1


@pytest.mark.parametrize("is_async", [False, True])
def test_a_closed_model_reads_nothing(bundle: Path, is_async: bool) -> None:
    """The numbers of its files may be another's by now."""
    if is_async:
        served = AsyncLLM(bundle)
        asyncio.run(served.close())
        core = served._llm.core
    else:
        llm = LLM(bundle)
        llm.close()
        core = llm.core
    with pytest.raises(BundleError, match="this backend was closed, so it runs nothing more"):
        core.score([1, 2, 3])
    with pytest.raises(BundleError, match="the files of the n-gram table are closed"):
        core.backend.rows.complete({})  # pyright: ignore[reportAttributeAccessIssue]


def test_tokens_that_come_in_the_next_step_are_read_at_once(bundle: Path) -> None:
    """While something else runs, such as a draft head; what is before them counts."""
    llm = LLM(bundle)
    rows = llm.core.backend.rows  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(rows, NgramRows)
    (table,) = rows._tables.values()
    prompt = list(range(40, 60))
    rows.prefetch([TokenWindow(prompt, 12, 15), TokenWindow(prompt, 0, 1)], at_once=True)
    (reading,) = table._prefetches
    reading.future.result()
    whole = table._rows_of([(prompt, 0)]).reshape(len(prompt), -1)
    for token in range(len(prompt)):
        assert table._cache.has(whole[token]).all() == (token in (0, 12, 13, 14)), token
