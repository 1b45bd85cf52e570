"""The arithmetic that a prompt needs: what no kernel can save."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction

from qwen4exp_trt.builder.weight_bytes import Component, component_of
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.weights import expected_weights

GATED_DELTA_RULE, SCORES, SPARSE_ATTENTION = "gated delta rule", "QSA scores", "QSA attention"
_RULE_FLOPS = 6
"""For an element of a head's state and a token: what the state holds of k, the update by it, and what it gives for q;
a product and a sum each. Chunked forms of the rule take more."""
_LOOKED_UP = (Component.EMBED_TOKENS, Component.NGRAM_TABLE)


def prompt_flops(config: ModelConfig, num_tokens: int) -> Mapping[str, float]:
    """Products and sums of a prompt with one row of logits by the part of the model, without its draft head.

    Elementwise work is left out.
    """
    flops: dict[str, float] = {}
    for name, shape in expected_weights(config).items():
        component = component_of(name)
        is_product = len(shape) >= 2 and not name.endswith("conv1d.weight") and component not in _LOOKED_UP
        if not is_product or component.is_of_draft_head:
            continue
        rows = 1 if component is Component.LM_HEAD else num_tokens
        share = Fraction(1)
        if component is Component.EXPERTS:
            share = Fraction(config.num_experts_per_tok, config.num_experts)
        flops[component.value] = flops.get(component.value, 0) + float(2 * rows * math.prod(shape) * share)
    linear = sum(map(config.is_linear, range(config.num_hidden_layers)))
    sparse = config.num_hidden_layers - linear
    state = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    flops[GATED_DELTA_RULE] = float(linear * num_tokens * _RULE_FLOPS * state)
    flops[SCORES] = float(sparse * _scores(config, num_tokens))
    flops[SPARSE_ATTENTION] = float(sparse * _attention(config, num_tokens))
    return flops


def _scores(config: ModelConfig, num_tokens: int) -> int:
    """Of one layer: each query behind the budget meets the key of every group before it with all indexer heads."""
    budget, ratio = config.indexer_budget, config.indexer_compress_ratio
    heads, dim = config.indexer_n_heads, config.indexer_head_dim
    if budget is None or ratio is None or heads is None or dim is None:
        return 0
    first = min(budget, num_tokens)
    groups = (num_tokens * (num_tokens + 1) - first * (first + 1)) // 2 // ratio
    return 2 * groups * heads * dim


def _attention(config: ModelConfig, num_tokens: int) -> int:
    """Of one layer: each query meets keys and values of the tokens before it, at most the budget and a broken group."""
    most = num_tokens
    if config.indexer_budget is not None and config.indexer_compress_ratio is not None:
        most = config.indexer_budget + config.indexer_compress_ratio - 1
    ramp = min(most, num_tokens)
    tokens = ramp * (ramp + 1) // 2 + (num_tokens - ramp) * most
    return 4 * tokens * config.num_attention_heads * config.head_dim
