from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bundles
import numpy as np
import pytest
import torch
from hf_parity import load_reference, reference_logits

from qwen4exp_trt.errors import BundleError, RequestError
from qwen4exp_trt.runtime import LLM
from qwen4exp_trt.runtime.evaluation import evaluate

HELDOUT = (bundles.ROOT / "demo" / "heldout.txt").read_text(encoding="utf-8")

REFERENCE_BOUND = 1e-3
"""Relative, of the perplexity."""


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    """The demo checkpoint in float32."""
    output = tmp_path_factory.mktemp("exact") / "bundle"
    return LLM(bundles.build(bundles.DEMO_CHECKPOINT, output, max_seq_len=256, block_size=16), num_blocks=16)


def demo_ids(llm: LLM, count: int) -> list[int]:
    assert llm.tokenizer is not None
    return llm.tokenizer.encode(HELDOUT, add_special_tokens=False)[:count]


def test_perplexity_equals_transformers(exact: LLM) -> None:
    """Windows above the indexer's budget of 96 tokens, and a shorter last one."""
    window, count = 160, 350
    assert exact.tokenizer is not None
    reference, ids = load_reference(bundles.DEMO_CHECKPOINT, "float32"), demo_ids(exact, count)
    losses = []
    for start in range(0, count, window):
        part = ids[start : start + window]
        logits = reference_logits(reference, part)[:-1, : exact.tokenizer.vocab_size]
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(part[1:]), reduction="none"))
    expected = math.exp(torch.cat(losses).double().mean())
    result = evaluate(exact, HELDOUT, window=window, max_tokens=count)
    assert (result.num_tokens, result.num_windows, result.window) == (count - 3, 3, window)
    assert result.perplexity == pytest.approx(expected, rel=REFERENCE_BOUND)
    assert result.comparison is None


@pytest.mark.trt
@pytest.mark.slow
def test_bf16_is_close_to_float32(exact: LLM, demo_llm: LLM) -> None:
    """Every figure against its definition in float64 on the logits of whole windows."""
    window, count = 100, 200
    result = evaluate(demo_llm, HELDOUT, window=window, max_tokens=count, base=exact)
    assert exact.tokenizer is not None and result.comparison is not None
    ids, size = demo_ids(exact, count), exact.tokenizer.vocab_size
    parts = [ids[:window], ids[window:]]
    this, base = (
        torch.cat([llm.score(part)[:-1, :size] for part in parts]).double().log_softmax(-1) for llm in (demo_llm, exact)
    )
    targets = torch.tensor([token for part in parts for token in part[1:]])
    kl = (base.exp() * (base - this)).sum(-1)
    found = result.comparison
    assert result.perplexity == pytest.approx(math.exp(-this.gather(1, targets[:, None]).mean()), rel=1e-5)
    assert found.base_perplexity == pytest.approx(math.exp(-base.gather(1, targets[:, None]).mean()), rel=1e-5)
    assert found.mean_kl == pytest.approx(float(kl.mean()), rel=1e-2)
    assert found.tail_kl == pytest.approx(float(np.quantile(kl, 0.999)), rel=1e-2)
    assert found.top1_agreement == float((this.argmax(-1) == base.argmax(-1)).double().mean())
    assert 0 < found.mean_kl < 0.01 and found.mean_kl < found.tail_kl and found.top1_agreement > 0.95


def test_a_bundle_equals_itself(tiny_bundle: Path, llm: LLM) -> None:
    result = evaluate(llm, "the quick brown fox", base=LLM(tiny_bundle))
    assert result.comparison is not None
    assert result.comparison.base_perplexity == result.perplexity
    assert (result.comparison.mean_kl, result.comparison.tail_kl, result.comparison.top1_agreement) == (0, 0, 1)


def test_rows_without_a_token_do_not_count(llm: LLM) -> None:
    assert llm.tokenizer is not None and llm.tokenizer.vocab_size < bundles.VOCAB_SIZE
    ids = llm.tokenizer.encode("the quick brown fox", add_special_tokens=False)
    logits = llm.score(ids)[:-1]
    for size, is_equal in ((llm.tokenizer.vocab_size, True), (bundles.VOCAB_SIZE, False)):
        loss = torch.nn.functional.cross_entropy(logits[:, :size], torch.tensor(ids[1:]))
        perplexity = evaluate(llm, "the quick brown fox").perplexity
        assert (perplexity == pytest.approx(math.exp(loss), rel=1e-5)) is is_equal


def test_windows_do_not_see_each_other(llm: LLM) -> None:
    """Two windows give what each gives alone; the lone token after the last window predicts nothing."""
    assert llm.tokenizer is not None
    text = "the quick brown fox jumps over it"
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    seen: list[tuple[int, int]] = []
    result = evaluate(llm, text, window=5, max_tokens=11, progress=lambda done, total: seen.append((done, total)))
    losses = [
        torch.nn.functional.cross_entropy(
            llm.score(part)[:-1, : llm.tokenizer.vocab_size], torch.tensor(part[1:]), reduction="none"
        )
        for part in (ids[:5], ids[5:10])
    ]
    assert result.perplexity == pytest.approx(math.exp(torch.cat(losses).mean()), rel=1e-5)
    assert (result.num_tokens, result.num_windows) == (8, 2)
    assert seen == [(1, 2), (2, 2)]


def test_the_default_window_is_what_the_bundle_allows(llm: LLM) -> None:
    assert evaluate(llm, "the quick").window == llm.manifest.limits.max_seq_len == 64


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "the text has 0 tokens; it needs two"),
        ("the quick", {"max_tokens": 1}, "max_tokens is 1; a text needs two tokens"),
        ("the quick", {"window": 1}, "the window is 1 tokens; it must have 2 to 64, the max_seq_len of the bundle"),
        ("the quick", {"window": 65}, "the window is 65 tokens"),
        ("the \udc80", {}, "the text has the lone surrogate U+DC80"),
    ],
)
def test_bad_requests(llm: LLM, text: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        evaluate(llm, text, **options)
    assert message in str(caught.value)


def stub(llm: LLM, tokenizer: Any) -> Any:
    return SimpleNamespace(tokenizer=tokenizer, manifest=llm.manifest, score=llm.score)


def test_bundles_of_different_vocabularies(llm: LLM) -> None:
    own = llm.tokenizer
    assert own is not None
    swapped = {5: own.token_bytes(6), 6: own.token_bytes(5)}
    others = {
        "a bundle without tokenizer cannot read text": None,
        f"different tokenizers, of {own.vocab_size} and 7 ids": SimpleNamespace(vocab_size=7),
        f"different tokenizers: token 5 is {own.token_bytes(5)!r} in one and {own.token_bytes(6)!r}": SimpleNamespace(
            vocab_size=own.vocab_size, token_bytes=lambda token: swapped.get(token, own.token_bytes(token))
        ),
    }
    for message, tokenizer in others.items():
        with pytest.raises(RequestError) as caught:
            evaluate(llm, "the quick", base=stub(llm, tokenizer))
        assert message in str(caught.value)


def test_logits_that_are_not_finite(llm: LLM) -> None:
    broken = stub(llm, llm.tokenizer)
    broken.score = lambda ids: llm.score(ids) / 0
    with pytest.raises(BundleError, match="the bundle to compare with gives logits that are not finite in window 0"):
        evaluate(llm, "the quick", base=broken)
