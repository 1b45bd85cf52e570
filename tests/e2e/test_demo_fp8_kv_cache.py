"""The demo checkpoint with its KV cache in FP8: it generates, and predicts text as well as before."""

from __future__ import annotations

from pathlib import Path

import bundles
import pytest
import torch

from qwen4exp_trt.runtime import LLM, SamplingParams
from qwen4exp_trt.runtime.backend import EagerBackend
from qwen4exp_trt.runtime.evaluation import evaluate
from qwen4exp_trt.runtime.specs import StateKind

WINDOW = 250
"""Tokens that attend to each other, far above the indexer's budget of 96."""

MAX_PERPLEXITY_CHANGE, MAX_MEAN_KL, MIN_TOP1_AGREEMENT = 0.005, 5e-4, 0.98
"""Measured on 400 to 3200 tokens of the text: up to 0.0005, 1.4e-4 to 1.8e-4 nats, and 0.992."""

DTYPES = {"auto": torch.float32, "fp8": torch.float8_e4m3fn}


@pytest.fixture(scope="module")
def llms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LLM]:
    folder = tmp_path_factory.mktemp("kv-cache")

    def build(kv_cache_dtype: str) -> Path:
        limits = {"max_seq_len": 256, "prefill_chunk": 256, "block_size": 16}
        return bundles.build(bundles.DEMO_CHECKPOINT, folder / kv_cache_dtype, kv_cache_dtype=kv_cache_dtype, **limits)

    return {name: LLM(build(name), num_blocks=48) for name in ("auto", "fp8")}


@pytest.mark.slow
def test_perplexity_barely_changes(llms: dict[str, LLM]) -> None:
    text = bundles.HELDOUT_TEXT.read_text(encoding="utf-8")
    result = evaluate(llms["fp8"], text, window=WINDOW, max_tokens=WINDOW, base=llms["auto"])
    found = result.comparison
    assert found is not None and result.num_tokens == WINDOW - 1
    assert abs(result.perplexity / found.base_perplexity - 1) < MAX_PERPLEXITY_CHANGE
    assert 0 < found.mean_kl < MAX_MEAN_KL, "rounding must show"
    assert found.top1_agreement > MIN_TOP1_AGREEMENT


def test_it_generates_from_a_cache_of_a_quarter_of_the_size(llms: dict[str, LLM]) -> None:
    sizes = {}
    for name, llm in llms.items():
        backend = llm.core.backend
        assert isinstance(backend, EagerBackend)
        caches = [backend.states[spec.name] for spec in backend.program.states if spec.kind is StateKind.KV_CACHE]
        assert {cache.dtype for cache in caches} == {DTYPES[name]}
        assert llm.manifest.kv_cache_dtype == str(DTYPES[name]).removeprefix("torch.")
        sizes[name] = sum(cache.nbytes for cache in caches)
    assert 4 * sizes["fp8"] == sizes["auto"]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llms["fp8"].generate(["When they came to the house, ", "In the beginning"], params)
    assert all(output.outputs[0].text.strip() and len(output.outputs[0].token_ids) == 12 for output in outputs)
