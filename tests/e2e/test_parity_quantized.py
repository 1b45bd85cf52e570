"""Every published quantized format beside transformers on the weights that it means."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hf_parity import (
    REFERENCE_BOUND,
    VISIBLE,
    Pair,
    assert_greedy_tokens,
    bf16_logits,
    build_llm,
    check_bf16,
    generate_greedy,
    load_reference,
    random_prompt,
    reference_logits,
    relative_error,
)
from model_zoo import build_hf_model, tiny_config_dict
from quantized_checkpoints import RELEASES, quantize_tensors, save_quantized

CONFIG = tiny_config_dict()
PROMPT = random_prompt(70, eos=(20, 41))
"""Longer than the indexer's budget, with n-grams that are cut."""


@dataclass(frozen=True)
class QuantizedPair:
    """Our bundle of a quantized checkpoint, and transformers on the weights that it means and on the original ones."""

    pair: Pair
    dequantized: Path
    original: torch.nn.Module


def write_checkpoints(folder: Path, release: str) -> QuantizedPair:
    original = build_hf_model(CONFIG, seed=2)
    state = {name.removeprefix("model."): tensor.clone() for name, tensor in original.state_dict().items()}
    tensors = quantize_tensors(state, RELEASES[release])
    save_quantized(folder / "checkpoint", tensors, RELEASES[release], CONFIG)
    model = build_hf_model(CONFIG)
    model.load_state_dict({name: tensors.values[name.removeprefix("model.")] for name in model.state_dict()})
    model.save_pretrained(folder / "dequantized")
    llm = build_llm(folder / "checkpoint", folder / "bundle", "float32")
    reference = load_reference(folder / "dequantized", "float32")
    return QuantizedPair(Pair(reference, llm, folder / "checkpoint"), folder / "dequantized", original)


@pytest.fixture(scope="module", params=RELEASES)
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> QuantizedPair:
    return write_checkpoints(tmp_path_factory.mktemp("quantized"), request.param)


def test_logits_equal_transformers_on_dequantized_weights(quantized: QuantizedPair) -> None:
    logits = quantized.pair.check(PROMPT)
    assert relative_error(reference_logits(quantized.original, PROMPT), logits) > VISIBLE, "quantization must show"


def test_greedy_tokens_equal_transformers_on_dequantized_weights(quantized: QuantizedPair) -> None:
    prompts = [PROMPT[:9], PROMPT[:40]]
    results = generate_greedy(quantized.pair.core(), prompts, max_tokens=16)
    for prompt, (tokens, _) in zip(prompts, results, strict=True):
        expected = reference_logits(quantized.pair.reference, prompt + tokens)[len(prompt) - 1 : -1]
        assert_greedy_tokens(expected, torch.tensor(tokens), REFERENCE_BOUND)


@pytest.mark.trt
def test_bf16_of_dequantized_weights_costs_no_more_than_in_transformers(tmp_path: Path) -> None:
    """The reference rounds the dequantized weights to BF16 as we do; both are held to the exact ones."""
    quantized = write_checkpoints(tmp_path, "mixed precision")
    llm = build_llm(tmp_path / "checkpoint", tmp_path / "bf16_bundle", "bfloat16")
    prompts = [random_prompt(100, seed) for seed in range(4)]
    check_bf16(*bf16_logits(quantized.dequantized, llm, prompts))
