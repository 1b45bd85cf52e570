"""Slots and pages under load, after failures, and bundles that lack something."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import bundles
import pytest
import torch
from serving import assert_idle, generated, ids, loaded_backend, observed_steps

from qwen4exp_trt.errors import BundleError, RequestError
from qwen4exp_trt.runtime import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEXT = "the quick brown fox"


def test_a_slot_and_its_pages_forget_the_sequence_before(tiny_bundle: Path) -> None:
    prompt, other = ids(list(range(20, 50))), ids(list(range(200, 240)))
    used, fresh = LLM(tiny_bundle, num_blocks=8), LLM(tiny_bundle, num_blocks=8)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    used.generate([other, other], params)
    assert generated(used.generate(prompt, params)[0]) == generated(fresh.generate(prompt, params)[0])


def test_few_pages_serve_many_requests_one_after_another(tiny_bundle: Path, llm: LLM) -> None:
    small = LLM(tiny_bundle, num_blocks=3)
    prompts = [ids([10 + index] * 12) for index in range(5)]
    with observed_steps(small) as steps:
        results = small.generate(prompts, GREEDY)
    assert [generated(result) for result in results] == [generated(result) for result in llm.generate(prompts, GREEDY)]
    assert max(len(step["seq_lens"]) for step in steps) == 1, "3 pages are one request of 18 tokens"
    assert_idle(small)
    with pytest.raises(RequestError, match=r"may take 25 tokens, 4 pages of the KV cache, but there are 3; lower"):
        small.generate([prompts[0], ids([5] * 19)], GREEDY)
    with pytest.raises(RequestError, match="may take 25 tokens"):
        small.score([5] * 25)
    assert_idle(small)


@pytest.mark.parametrize("num_blocks", [0, -1, 2.5, "4"])
def test_bad_number_of_pages(tiny_bundle: Path, num_blocks: Any) -> None:
    with pytest.raises(BundleError, match=f"num_blocks is {num_blocks!r}; the KV cache needs at least one page"):
        LLM(tiny_bundle, num_blocks=num_blocks)


def test_loading_reports_the_bytes_of_the_weights(tiny_bundle: Path) -> None:
    seen: list[tuple[int, int]] = []
    llm = LLM(tiny_bundle, progress=lambda *numbers: seen.append(numbers))
    backend = loaded_backend(llm)
    total = sum(weight.nbytes for weight in backend.weights.values())
    assert {numbers[1] for numbers in seen} == {total}
    assert seen == sorted(seen) and seen[-1] == (total, total)


def test_weights_are_no_pages_of_mapped_files(tiny_bundle: Path) -> None:
    """Those would be page cache, which takes a GPU's memory where that is the CPU's, too."""
    backend = loaded_backend(LLM(tiny_bundle))
    mapped = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if ".safetensors" in line]
    ranges = [tuple(int(bound, 16) for bound in line[0].split("-")) for line in mapped]
    for name, weight in backend.weights.items():
        assert not any(begin <= weight.data_ptr() < end for begin, end in ranges), name


@pytest.mark.parametrize("name", ["bundle", "checkpoint"])
@pytest.mark.parametrize("value", [5, b"bundle", ["bundle"]])
def test_a_path_that_is_none(tiny_bundle: Path, name: str, value: Any) -> None:
    with pytest.raises(BundleError, match=re.escape(f"{name} is {value!r}; the path of a folder was expected")):
        LLM(**{"bundle": tiny_bundle, name: value})


def test_poisoned_weights_fail_the_request_and_leave_no_memory_taken(tiny_bundle: Path) -> None:
    llm = LLM(tiny_bundle)
    backend = loaded_backend(llm)
    (head,) = (weight for name, weight in backend.weights.items() if name.startswith("lm_head"))
    healthy = head[0].clone()
    head[0] = torch.nan
    with pytest.raises(RequestError, match=r"NaN.*weights or states are damaged"):
        llm.generate([TEXT, TEXT, TEXT, TEXT, TEXT], GREEDY)
    assert_idle(llm)
    head[0] = healthy
    assert len(generated(llm.generate(TEXT, GREEDY)[0])) == 6


def test_bundle_without_tokenizer_works_with_token_ids(tmp_path: Path, tiny_llm: LLM) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    for name in ("config.json", "model.safetensors"):
        (checkpoint / name).symlink_to(
            Path(tiny_llm.manifest.checkpoint.path if tiny_llm.manifest.checkpoint else "") / name
        )
    llm = LLM(bundles.build(checkpoint, tmp_path / "bundle"))
    assert llm.default_sampling_params == SamplingParams()
    assert llm.manifest.stop_token_ids == (bundles.ENDOFTEXT,)
    (result,) = llm.generate(ids([5, 6, 7]), SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1))
    output = result.outputs[0]
    assert (len(output.token_ids), output.text) == (4, "")
    assert [
        entry[token].decoded_token for entry, token in zip(output.logprobs or [], output.token_ids, strict=True)
    ] == [None] * 4
    assert [chunk.token_ids for chunk in llm.stream(ids([5, 6, 7]), GREEDY)][:4] == [
        [token] for token in output.token_ids
    ]
    with pytest.raises(RequestError, match=r"no tokenizer; give the prompt as \{'prompt_token_ids': \[...\]\}"):
        llm.generate(TEXT)
    with pytest.raises(RequestError, match="stop needs text, but this bundle has no tokenizer; use stop_token_ids"):
        llm.generate(ids([5]), SamplingParams(stop="x"))
    with pytest.raises(RequestError, match="no chat template or no tokenizer; use generate with token ids"):
        llm.chat([{"role": "user", "content": "Hi"}])


def test_threads_share_a_model(llm: LLM) -> None:
    prompts = [ids([10 + index] * (3 + index)) for index in range(8)]
    expected = [generated(llm.generate(prompt, GREEDY)[0]) for prompt in prompts]
    scores = llm.score([5, 6, 7])

    def serve(index: int) -> list[int]:
        if index % 2:
            return generated(llm.generate(prompts[index], GREEDY)[0])
        return [token for chunk in llm.stream(prompts[index], GREEDY) for token in chunk.token_ids]

    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert list(pool.map(serve, range(8))) == expected
    assert torch.equal(llm.score([5, 6, 7]), scores)
