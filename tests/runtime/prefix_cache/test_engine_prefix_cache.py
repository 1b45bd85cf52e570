"""Prefixes of an engine, over the simulator of TensorRT's runtime.

One sequence at a time and chunks of one block, so that a restored prompt goes on with the very steps that it would have
had: its text is the same in BF16 as well.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import bundles
import pytest
from cpu_stream import CpuStream
from serving import assert_idle, generated, ids
from trt_simulator import SimulatedTensorRT

from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.backend import EagerBackend, engines_of
from qwen4exp_trt.runtime.prefix_cache.cache import PrefixCache
from qwen4exp_trt.runtime.tensorrt.module import load_trt

pytestmark = [pytest.mark.trt, pytest.mark.eager("compares both backends itself")]

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module", params=["tiny", pytest.param("demo", marks=pytest.mark.slow)])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engine")
    if request.param == "tiny":
        checkpoint, size, longest = bundles.tiny_checkpoint(folder / "checkpoint"), 8, 64
    else:
        checkpoint, size, longest = bundles.DEMO_CHECKPOINT, 32, 256
    limits = {"max_seq_len": longest, "prefill_chunk": size, "block_size": size}
    return bundles.build(checkpoint, folder / "bundle", activation_dtype="bfloat16", **limits)


def answers(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [generated(llm.generate([ids(prompt)], GREEDY)[0]) for prompt in prompts]


def test_text_is_that_without_a_cache(bundle: Path, tmp_path: Path) -> None:
    trt = SimulatedTensorRT(load_trt("tensorrt-rtx"), bundle)

    def load(**options: object) -> LLM:
        llm = LLM(bundle, **options)  # pyright: ignore[reportArgumentType]
        assert isinstance(llm.core.backend, EagerBackend)
        llm.core.backend = engines_of(trt, bundle, llm.manifest, llm.core.backend, make_stream=CpuStream)
        return llm

    expect_the_same(load, load(enable_prefix_caching=False).manifest.limits.block_size, tmp_path / "cache")


def expect_the_same(load: Callable[..., LLM], block: int, folder: Path) -> None:
    text = [3 + 7 * index % 300 for index in range(6 * block)]
    prompts = [text[: 5 * block + 3], text[: 3 * block] + text[: block + 1]]
    expected = answers(load(enable_prefix_caching=False), prompts)
    with load(cache_dir=folder) as llm:
        assert answers(llm, prompts) == expected
        assert answers(llm, prompts) == expected
        assert hits(llm) == {"device": 9 * block, "host": 0, "disk": 0}
        assert_idle(llm)
    with load(cache_dir=folder) as again:
        assert answers(again, prompts) == expected
        assert hits(again) == {"device": 3 * block, "host": 0, "disk": 6 * block}


def hits(llm: LLM) -> dict[str, int]:
    assert isinstance(llm.core.prefix_cache, PrefixCache)
    return dict(llm.core.prefix_cache.counters.hit_tokens)
