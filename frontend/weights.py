"""The weights of the model under their canonical names, and how a checkpoint of any public layout provides them.

A canonical name is the Hugging Face name without prefix: ``layers.3.self_attn.q_proj.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from qwen4exp_trt.errors import CheckpointError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.ngram import ngram_hash
from qwen4exp_trt.runtime.checkpoint import Checkpoint, listing
from qwen4exp_trt.runtime.specs import Source, WeightRecipe
from qwen4exp_trt.runtime.weights import transform

Shape = tuple[int, ...]

EMBED_TOKENS = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"

_PREFIXES = ("model.language_model.", "language_model.model.", "model.")
_LM_HEAD_NAMES = (LM_HEAD, "language_model.lm_head.weight")
_FLOAT_DTYPES = ("BF16", "F16", "F32")
_SET_ASIDE = {
    "mtp": re.compile(r"mtp\."),
    "vision": re.compile(r"(model\.)?visual\."),
    "unused": re.compile(r".*\b(hashstats_\w+|token_lookup)\b|.*\bhyper_connection_mixer\.block_inject_weight\b"),
}
"""Checkpoint tensors that the text model does not have, by what they belong to."""


def expected_weights(config: ModelConfig) -> dict[str, Shape]:
    """Canonical name -> shape of every weight of the text model."""
    table = (config.vocab_size, config.hidden_size)
    shapes = {EMBED_TOKENS: table, LM_HEAD: table} | _under("hyper_connection_mixer", _hc_read_shapes(config))
    for layer in range(config.num_hidden_layers):
        shapes |= _under(f"layers.{layer}", _layer_shapes(config, layer))
    return shapes


def _under(prefix: str, shapes: dict[str, Shape]) -> dict[str, Shape]:
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def _layer_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    inject = {"block_inject_weight.weight": (config.hc_count, config.stack_width)}
    hc_shapes = _hc_read_shapes(config) | inject
    shapes = _under("attn_hyper_connection", hc_shapes) | _under("mlp_hyper_connection", hc_shapes)
    if config.is_linear(layer):
        shapes |= _under("linear_attn", _linear_attn_shapes(config))
    else:
        shapes |= _under("self_attn", _self_attn_shapes(config))
    if layer in config.ple_layers:
        shapes |= _under("ple", _ple_shapes(config, layer))
    return shapes | _under("mlp", _mlp_shapes(config))


def _hc_read_shapes(config: ModelConfig) -> dict[str, Shape]:
    return {
        "hc_norm.weight": (config.stack_width,),
        "input_mix_weight_down.weight": (config.hc_lowrank, config.stack_width),
        "input_mix_weight_up.weight": (config.stack_width, config.hc_lowrank),
    }


def _linear_attn_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, heads, value_dim = config.hidden_size, config.linear_num_value_heads, config.linear_value_dim
    return {
        "in_proj_qkv.weight": (config.linear_conv_dim, hidden),
        "in_proj_z.weight": (value_dim, hidden),
        "in_proj_b.weight": (heads, hidden),
        "in_proj_a.weight": (heads, hidden),
        "conv1d.weight": (config.linear_conv_dim, 1, config.linear_conv_kernel_dim),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (config.linear_value_head_dim,),
        "out_proj.weight": (hidden, value_dim),
    }


def _self_attn_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, head_dim = config.hidden_size, config.head_dim
    query_dim, kv_dim = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    shapes: dict[str, Shape] = {
        "q_proj.weight": (2 * query_dim, hidden),
        "k_proj.weight": (kv_dim, hidden),
        "v_proj.weight": (kv_dim, hidden),
        "o_proj.weight": (hidden, query_dim),
        "q_norm.weight": (head_dim,),
        "k_norm.weight": (head_dim,),
    }
    if config.indexer_head_dim and config.indexer_n_heads:
        shapes |= {
            "indexer.index_qk_proj.weight": ((config.indexer_n_heads + 1) * config.indexer_head_dim, hidden),
            "indexer.q_layernorm.weight": (config.indexer_head_dim,),
            "indexer.k_layernorm.weight": (config.indexer_head_dim,),
        }
    return shapes


def _ple_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    width = config.stack_width
    return {
        "ple_embedding.ngram_embedding.weight": (ngram_hash(config, layer).num_rows, config.ngram_head_dim),
        "key_proj.weight": (width, config.ple_embed_dim),
        "value_proj.weight": (config.hidden_size, config.ple_embed_dim),
        "norm_key.weight": (width,),
        "norm_query.weight": (width,),
        "norm_conv.weight": (width,),
        "conv1d.weight": (width, 1, config.ple_conv_kernel_size),
    }


def _mlp_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, experts = config.hidden_size, config.num_experts
    moe, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
    return {
        "gate.weight": (experts, hidden),
        "experts.gate_up_proj": (experts, 2 * moe, hidden),
        "experts.down_proj": (experts, hidden, moe),
        "shared_expert.gate_proj.weight": (shared, hidden),
        "shared_expert.up_proj.weight": (shared, hidden),
        "shared_expert.down_proj.weight": (hidden, shared),
        "shared_expert_gate.weight": (1, hidden),
    }
