"""Text with the prefix cache is the text without it, token for token."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import bundles
import pytest
from serving import assert_idle, generated, ids

from qwen4exp_trt.errors import CacheError
from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.prefix_cache.cache import PrefixCache

LIMITS = {"max_batch_size": 3, "max_seq_len": 256, "prefill_chunk": 48, "block_size": 16}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("demo") / "bundle"
    return bundles.build(bundles.DEMO_CHECKPOINT, output, activation_dtype="float32", **LIMITS)


@pytest.fixture(scope="module")
def plain(bundle: Path) -> LLM:
    return LLM(bundle, enable_prefix_caching=False)


@pytest.fixture(scope="module")
def text(plain: LLM) -> list[int]:
    assert plain.tokenizer is not None
    return plain.tokenizer.encode(bundles.HELDOUT_TEXT.read_text(encoding="utf-8"), add_special_tokens=False)[:400]


@pytest.fixture
def llm(bundle: Path) -> Iterator[LLM]:
    llm = LLM(bundle, prefix_cache_bytes=2**30)
    yield llm
    assert_idle(llm)


def cache_of(llm: LLM) -> PrefixCache:
    assert isinstance(llm.core.prefix_cache, PrefixCache)
    return llm.core.prefix_cache


def hit_tokens(llm: LLM) -> dict[str, int]:
    return dict(cache_of(llm).counters.hit_tokens)


def answer(llm: LLM, *prompts: list[int], params: SamplingParams = GREEDY) -> list[list[int]]:
    return [generated(output) for output in llm.generate([ids(prompt) for prompt in prompts], params)]


def test_shared_prefixes(llm: LLM, plain: LLM, text: list[int]) -> None:
    """Beyond the indexer's budget of 96 tokens; together, and after each other."""
    prompts = [text[:130], text[:100] + text[200:220], text[:100] + text[300:310], text[:16]]
    expected = answer(plain, *prompts)
    assert answer(llm, *prompts) == expected
    hits = llm.generate([ids(prompt) for prompt in prompts], GREEDY)
    assert [generated(output) for output in hits] == expected
    assert [output.metrics.num_cached_tokens for output in hits] == [128, 112, 96, 0]
    last = llm.generate([ids(text[:100] + text[350:360])], GREEDY)[0]
    assert last.metrics.num_cached_tokens == 96, "where the others part"


def test_turns_of_a_conversation(llm: LLM, plain: LLM, text: list[int]) -> None:
    prompt, history = text[:40], []
    for turn in range(3):
        (expected,) = answer(plain, prompt)
        (output,) = llm.generate([ids(prompt)], GREEDY)
        assert generated(output) == expected
        if turn:
            assert output.metrics.num_cached_tokens == (len(history) - 1) // 16 * 16
        history = prompt + expected
        prompt = history + text[100 + 7 * turn : 107 + 7 * turn]


def test_restart(bundle: Path, plain: LLM, text: list[int], tmp_path: Path) -> None:
    """A, and a snapshot; B shares a prefix; both again in another process."""
    first, second = text[:120], text[:100] + text[200:210]
    expected = answer(plain, first, second)
    with LLM(bundle, cache_dir=tmp_path / "cache") as llm:
        assert answer(llm, first, second) == expected
    with LLM(bundle, cache_dir=tmp_path / "cache") as again:
        assert answer(again, first, second) == expected
        assert hit_tokens(again) == {"device": 96, "host": 0, "disk": 112}, "the second shares pages of the first"
        assert_idle(again)


def test_preemption(bundle: Path, plain: LLM, text: list[int], tmp_path: Path) -> None:
    """Pages for one and a half sequences: one gives way, and goes on from what the cache kept, in whatever tier."""
    prompts, params = [text[:58], text[100:158]], SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True)
    expected = answer(plain, *prompts, params=params)
    with LLM(bundle, num_blocks=9, host_cache_bytes=2**20, cache_dir=tmp_path / "cache") as llm:
        assert answer(llm, *prompts, params=params) == expected
        assert llm.core.metrics.preemptions.total() > 0
        assert sum(hit_tokens(llm).values()) > 0
        assert answer(llm, *prompts, params=params) == expected
        assert_idle(llm)


@pytest.mark.parametrize("damage", ["torn", "flipped", "swapped", "gone"])
def test_damaged_files_are_a_miss(
    tiny_bundle: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder, prompt = tmp_path / "cache", list(range(3, 43))
    with LLM(tiny_bundle, cache_dir=folder) as llm:
        expected = answer(llm, prompt)
    files = sorted(folder.glob("*/*.blob"))
    for path, other in zip(files, [*files[1:], files[0]], strict=True):
        data = bytearray(path.read_bytes())
        if damage == "torn":
            path.write_bytes(data[: len(data) * 2 // 3])
        elif damage == "flipped":
            data[-5] ^= 4
            path.write_bytes(data)
        elif damage == "swapped":
            shutil.copyfile(other, path)
    with LLM(tiny_bundle, cache_dir=folder) as again:
        if damage == "gone":
            shutil.rmtree(folder)
        with caplog.at_level(logging.WARNING):
            assert answer(again, prompt) == expected
        assert cache_of(again).counters.hits == 0
        assert "is not used" in caplog.text
        assert answer(again, prompt) == expected
        assert cache_of(again).counters.hits == 1
    with LLM(tiny_bundle, cache_dir=folder) as whole_again:
        assert answer(whole_again, prompt) == expected


def test_two_models_in_one_folder(tiny_bundle: Path, tmp_path: Path) -> None:
    other = bundles.build(tiny_bundle.parent / "tiny-checkpoint", tmp_path / "other", block_size=4)
    prompt, options = list(range(3, 43)), {"cache_dir": tmp_path / "cache"}
    for tokens_on_disk in (0, 32):
        with LLM(tiny_bundle, **options) as llm, LLM(other, **options) as second:
            assert answer(llm, prompt) == answer(second, prompt)
            assert hit_tokens(llm)["disk"] == tokens_on_disk
            assert hit_tokens(second)["disk"] == (36 if tokens_on_disk else 0)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_metrics(tiny_bundle: Path) -> None:
    llm, prompt = LLM(tiny_bundle), list(range(3, 43))
    answer(llm, prompt)
    answer(llm, prompt)
    values = {
        (metric.name, *sample.labels.values()): sample.value
        for metric in llm.core.metrics.collect()
        for sample in metric.samples
    }
    assert values["qwen4exp_prefix_cache_lookups",] == 2
    assert values["qwen4exp_prefix_cache_successful_lookups",] == 1
    assert values["qwen4exp_prefix_cache_hit_tokens", "device"] == 32
    device_bytes = values["qwen4exp_prefix_cache_bytes", "device"]
    assert isinstance(device_bytes, int) and device_bytes > 0
    assert values["qwen4exp_prefix_cache_hits",] == 32, "as vLLM names it"


def test_a_folder_that_cannot_be_used(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="prefix cache cannot be kept in"):
        LLM(tiny_bundle, cache_dir=tmp_path / "file")
