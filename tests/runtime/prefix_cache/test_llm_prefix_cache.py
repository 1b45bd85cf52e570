"""Text with the prefix cache is the text without it, token for token."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import bundles
import pytest
import torch
from serving import assert_idle, generated, ids
from torch import Tensor

from qwen4exp_trt.errors import CacheError
from qwen4exp_trt.runtime import LLM, RequestOutput, SamplingParams
from qwen4exp_trt.runtime.manifest import MANIFEST_FILE
from qwen4exp_trt.runtime.prefix_cache.cache import PrefixCache

LIMITS = {"max_batch_size": 3, "max_seq_len": 256, "prefill_chunk": 48, "block_size": 16}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)


@dataclass
class Model:
    bundle: Path
    plain: LLM
    """Without a cache."""
    text: list[int]

    def check(self, llm: LLM, *prompts: list[int], params: SamplingParams = GREEDY) -> list[RequestOutput]:
        """The text of ``prompts`` is that without a cache, token for token, and so are their probabilities."""
        requests = [ids(prompt) for prompt in prompts]
        expected, outputs = self.plain.generate(requests, params), llm.generate(requests, params)
        assert list(map(generated, outputs)) == list(map(generated, expected))
        for one, other in zip(outputs, expected, strict=True):
            assert one.outputs[0].cumulative_logprob == pytest.approx(other.outputs[0].cumulative_logprob, abs=1e-4)
        return outputs


@pytest.fixture(scope="module", params=["tiny", pytest.param("demo", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The indexer of both selects within these prompts: the demo's budget is 96 tokens."""
    folder = tmp_path_factory.mktemp(request.param)
    tiny = bundles.tiny_checkpoint(folder / "checkpoint", mtp_num_hidden_layers=1)
    checkpoint = bundles.DEMO_CHECKPOINT if request.param == "demo" else tiny
    bundle = bundles.build(checkpoint, folder / "bundle", activation_dtype="float32", **LIMITS)
    plain = LLM(bundle, enable_prefix_caching=False)
    assert plain.tokenizer is not None
    text = plain.tokenizer.encode(bundles.HELDOUT_TEXT.read_text(encoding="utf-8")[:4000], add_special_tokens=False)
    return Model(bundle, plain, text[:400])


def cache_of(llm: LLM) -> PrefixCache:
    assert isinstance(llm.core.prefix_cache, PrefixCache)
    return llm.core.prefix_cache


def hit_tokens(llm: LLM) -> dict[str, int]:
    return dict(cache_of(llm).counters.hit_tokens)


def answer(llm: LLM, prompt: list[int]) -> list[int]:
    return generated(llm.generate([ids(prompt)], GREEDY)[0])


def test_shared_prefixes(model: Model) -> None:
    """Together, and after each other."""
    llm, text = LLM(model.bundle, prefix_cache_bytes=2**30), model.text
    prompts = [text[:130], text[:100] + text[200:220], text[:100] + text[300:310], text[:16]]
    model.check(llm, *prompts)
    hits = model.check(llm, *prompts)
    assert [output.metrics.num_cached_tokens for output in hits] == [128, 112, 96, 0]
    (last,) = model.check(llm, text[:100] + text[350:360])
    assert last.metrics.num_cached_tokens == 96, "where the others part"
    assert_idle(llm)


def test_turns_of_a_conversation(model: Model) -> None:
    llm, history = LLM(model.bundle), []
    for turn in range(4):
        prompt = history + model.text[40 * turn : 40 * turn + 21]
        (output,) = model.check(llm, prompt)
        assert output.metrics.num_cached_tokens == (len(history) - 1) // 16 * 16 * (turn > 0)
        history = prompt + generated(output)


def test_restart(model: Model, tmp_path: Path) -> None:
    """A, and a snapshot; B shares a prefix; both again in another process."""
    prompts = [model.text[:120], model.text[:100] + model.text[200:210]]
    for tokens in ({"device": 0, "host": 0, "disk": 0}, {"device": 96, "host": 0, "disk": 112}):
        with LLM(model.bundle, cache_dir=tmp_path / "cache") as llm:
            model.check(llm, *prompts)
            assert hit_tokens(llm) == tokens, "the second shares pages of the first"
            assert_idle(llm)


def test_preemption(model: Model, tmp_path: Path) -> None:
    """Pages for one and a half sequences: one gives way, and goes on from what the cache kept, in whatever tier."""
    prompts = [model.text[:58], model.text[100:158]]
    params = replace(GREEDY, max_tokens=25)
    with LLM(model.bundle, num_blocks=9, host_cache_bytes=2**20, cache_dir=tmp_path / "cache") as llm:
        model.check(llm, *prompts, params=params)
        assert llm.core.metrics.preemptions.total() > 0
        assert sum(hit_tokens(llm).values()) > 0
        model.check(llm, *prompts, params=params)
        assert_idle(llm)


def test_prompt_a_preempted_by_b_and_a_restart(model: Model, tmp_path: Path) -> None:
    """A runs, B of a higher priority takes its memory, both begin alike; then the same in another process."""
    prompts = [model.text[:105], model.text[:100] + model.text[200:204]]
    expected = [answer(model.plain, prompt) for prompt in prompts]
    for tokens_on_disk in (0, 96):
        with LLM(model.bundle, num_blocks=8, max_num_seqs=1, cache_dir=tmp_path / "cache") as llm:
            core = llm.core
            first, second = (
                core.make_sequence(None, prompt, GREEDY, priority=-index) for index, prompt in enumerate(prompts)
            )
            core.add(first)
            while first.num_output_tokens < 2:
                core.step()
            core.add(second)
            while core.scheduler.num_unfinished:
                core.step()
            assert first.metrics.num_preemptions == 1
            assert [generated(sequence.request_output()) for sequence in (first, second)] == expected
            assert hit_tokens(llm)["disk"] >= tokens_on_disk
            assert_idle(llm)


def kept_pages(llm: LLM) -> dict[tuple[bytes, str], Tensor]:
    """What every page that the tree has says, by prefix and state."""
    layout = cache_of(llm).tiers.layouts["page"]
    nodes = [node for node in cache_of(llm).tree.root.below() if node.page is not None]
    rows = ((node.key, layout.rows(layout.read(node.page))) for node in nodes if node.page is not None)
    return {(key, name): row for key, states in rows for name, row in states.items()}


@pytest.mark.parametrize("speculate", ["mtp:3", pytest.param("ngram:4", marks=pytest.mark.slow)])
def test_beside_drafts(model: Model, speculate: str, tmp_path: Path) -> None:
    """Only what is committed is kept, and what is kept never changes."""
    params = replace(GREEDY, max_tokens=22)
    with LLM(model.bundle, speculate=speculate, cache_dir=tmp_path / "cache") as llm:
        histories = [model.text[:10] * 4, model.text[:10] * 3 + model.text[40:47]]
        for turn in range(2):
            before = kept_pages(llm)
            for history in histories:
                (output,) = model.check(llm, history, params=params)
                assert turn == 0 or output.metrics.num_cached_tokens == (len(history) - 3) // 16 * 16
                history += [*generated(output), 50 + turn, 51]
            after = kept_pages(llm)
            assert all(torch.equal(after[name], page) for name, page in before.items())
        assert_idle(llm)
    with LLM(model.bundle, speculate=speculate, cache_dir=tmp_path / "cache") as again:
        (output,) = model.check(again, histories[0])
        assert output.metrics.num_cached_tokens > 0


@pytest.mark.parametrize("damage", ["torn", "flipped", "swapped", "gone"])
def test_damaged_files_are_a_miss(model: Model, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    folder, prompt = tmp_path / "cache", model.text[:40]
    with LLM(model.bundle, cache_dir=folder) as llm:
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
    with LLM(model.bundle, cache_dir=folder) as again:
        if damage == "gone":
            shutil.rmtree(folder)
        with caplog.at_level(logging.WARNING):
            assert answer(again, prompt) == expected
        assert cache_of(again).counters.hits == 0
        assert "is not used" in caplog.text
        assert answer(again, prompt) == expected
        assert cache_of(again).counters.hits == 1
    with LLM(model.bundle, cache_dir=folder) as whole_again:
        assert answer(whole_again, prompt) == expected


def test_two_models_in_one_folder(model: Model, tmp_path: Path) -> None:
    """They differ in what their manifests say of them."""
    other, prompt, options = tmp_path / "other", model.text[:40], {"cache_dir": tmp_path / "cache"}
    shutil.copytree(model.bundle, other)
    manifest = json.loads((other / MANIFEST_FILE).read_text())
    (other / MANIFEST_FILE).write_text(json.dumps({**manifest, "precision": "nvfp4"}))
    for tokens_on_disk in (0, 32):
        with LLM(model.bundle, **options) as llm, LLM(other, **options) as second:
            assert answer(llm, prompt) == answer(second, prompt)
            assert hit_tokens(llm)["disk"] == hit_tokens(second)["disk"] == tokens_on_disk
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_metrics(model: Model) -> None:
    llm, prompt = LLM(model.bundle), model.text[:40]
    answer(llm, prompt)
    answer(llm, prompt)
    values = {
        (metric.name, *sample.labels.values()): sample.value
        for metric in llm.core.metrics.collect()
        for sample in metric.samples
    }
    assert values["qwen4exp_prefix_cache_lookups",] == 2
    assert values["qwen4exp_prefix_cache_successful_lookups", "device"] == 1
    assert values["qwen4exp_prefix_cache_hit_tokens", "device"] == 32
    device_bytes = values["qwen4exp_prefix_cache_bytes", "device"]
    assert isinstance(device_bytes, int) and device_bytes > 0
    assert values["qwen4exp_prefix_cache_hits",] == 32, "as vLLM names it"


def test_a_folder_that_cannot_be_used(model: Model, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CacheError, match="prefix cache cannot be kept in"):
        LLM(model.bundle, cache_dir=tmp_path / "file")
