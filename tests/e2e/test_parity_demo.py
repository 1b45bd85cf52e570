"""The trained demo checkpoint against transformers, below and above its indexer's budget of 96 tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hf_parity import (
    REFERENCE_BOUND,
    Pair,
    assert_greedy_tokens,
    bf16_logits,
    build_llm,
    check_bf16,
    load_reference,
    reference_logits,
)

from qwen4exp_trt.runtime import SamplingParams

DEMO = Path(__file__).parents[2] / "demo"
CHECKPOINT = DEMO / "checkpoint"

LENGTHS = (60, 150, 400)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    llm = build_llm(CHECKPOINT, tmp_path_factory.mktemp("demo") / "bundle", "float32")
    return Pair(load_reference(CHECKPOINT, "float32"), llm, CHECKPOINT)


@pytest.fixture(scope="module")
def text(demo: Pair) -> list[int]:
    """Tokens of text that the model was not trained on."""
    assert demo.llm.tokenizer is not None
    return demo.llm.tokenizer.encode((DEMO / "heldout.txt").read_text(encoding="utf-8"), add_special_tokens=False)


@pytest.mark.parametrize("length", LENGTHS)
def test_demo_logits_equal_transformers(demo: Pair, text: list[int], length: int) -> None:
    assert demo.config.indexer_budget == 96
    demo.check(text[:length])


def test_demo_greedy_text_equals_transformers(demo: Pair, text: list[int]) -> None:
    """Decode starts below the budget and passes it."""
    prompt = text[:90]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    tokens = demo.llm.generate({"prompt_token_ids": prompt}, params)[0].outputs[0].token_ids
    expected = reference_logits(demo.reference, prompt + tokens)[len(prompt) - 1 : -1]
    assert_greedy_tokens(expected, torch.tensor(tokens), REFERENCE_BOUND)


@pytest.mark.trt
@pytest.mark.slow
def test_demo_bf16_costs_no_more_than_in_transformers(text: list[int], tmp_path: Path) -> None:
    llm = build_llm(CHECKPOINT, tmp_path / "bundle", "bfloat16")
    prompts = [text[start : start + length] for start, length in zip((0, 500, 1000), LENGTHS, strict=True)]
    check_bf16(*bf16_logits(CHECKPOINT, llm, prompts))
