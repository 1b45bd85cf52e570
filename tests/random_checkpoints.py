"""Quantized checkpoints of random weights, without the time that it takes to make a model of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from model_zoo import tiny_config_dict
from quantized_checkpoints import QuantizedTensors, Release, quantize_tensors, save_quantized
from torch import Tensor

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.ngram import ngram_hash
from qwen4exp_trt.frontend.weights import expected_weights


def random_tensors(config_dict: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Normal weights and the hash constants of a text model, by canonical name."""
    config, generator = ModelConfig.from_dict(config_dict, "random"), torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in expected_weights(config).items()}
    for layer in config.ple_layers:
        constants = ngram_hash(config, layer)
        embedding = f"layers.{layer}.ple.ple_embedding"
        tensors[f"{embedding}.layer_multipliers"] = torch.tensor(constants.multipliers)
        tensors[f"{embedding}.ngram_heads_vocab_sizes"] = torch.tensor(constants.vocab_sizes)
        tensors[f"{embedding}.ngram_heads_offsets"] = torch.tensor(constants.offsets)
    return tensors


def write_random(
    folder: Path,
    release: Release,
    edit: Callable[[dict[str, Tensor]], None] = lambda stored: None,
    seed: int = 0,
    **overrides: Any,
) -> QuantizedTensors:
    """A checkpoint of random weights; ``edit`` changes the stored tensors, under canonical names."""
    config = tiny_config_dict(**overrides)
    tensors = quantize_tensors(random_tensors(config, seed), release)
    edit(tensors.stored)
    save_quantized(folder, tensors, release, config)
    return tensors
