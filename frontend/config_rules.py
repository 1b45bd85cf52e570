"""The constraints of `ModelConfig`. Each message names the field, its value and the rule."""

from __future__ import annotations

import math
import typing
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from qwen4exp_trt.errors import ConfigError

if TYPE_CHECKING:
    from qwen4exp_trt.frontend.config import ModelConfig

LINEAR_ATTENTION = "linear_attention"
FULL_ATTENTION = "full_attention"

_INDEXER_KEYS = ("n_heads", "kv_heads", "head_dim", "budget", "compress_ratio")
_INDEXER_FIELDS = tuple(f"indexer_{key}" for key in _INDEXER_KEYS)

_SMALLEST = {
    "vocab_size": 1,
    "hidden_size": 1,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 1,
    "max_position_embeddings": 1,
    "linear_conv_kernel_dim": 2,
    "linear_key_head_dim": 1,
    "linear_value_head_dim": 1,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 1,
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 1,
    "shared_expert_intermediate_size": 1,
    "hc_count": 2,
    "hc_lowrank": 1,
    "mtp_num_hidden_layers": 0,
}
_SMALLEST_WITH_PLE = {
    "ple_embed_dim": 1,
    "ple_conv_kernel_size": 2,
    "ngram_size": 2,
    "heads_per_ngram": 1,
    "ngram_vocab_size_base": 1,
    "make_ngram_vocab_size_divisible_by": 1,
}


MAX_NUM_LAYERS = 1024
_LARGEST = {
    "num_hidden_layers": MAX_NUM_LAYERS,
    "num_experts": 8192,
    "hc_count": 64,
    "ngram_size": 16,
    "heads_per_ngram": 64,
}
"""Of what there is a tensor or a constant each: far above any model, and below what would take forever to list."""
_LARGEST_EXTENT = 2**31 - 1
"""Of every other integer but the seed."""


def require(condition: bool, name: str, value: object, rule: str) -> None:
    """Raise `ConfigError` unless ``condition`` holds."""
    if not condition:
        raise ConfigError(f"{name} is {value!r}; it must be {rule}")


def check_config(config: ModelConfig) -> None:
    """Raise `ConfigError` for the first constraint that ``config`` violates."""
    _check_types(config)
    _check_smallest(config, _SMALLEST)
    _check_largest(config)
    _check_attention(config)
    _check_moe_and_output(config)
    if any(getattr(config, name) is not None for name in _INDEXER_FIELDS):
        _check_indexer(config)
    if config.ple_layer_ids:
        _check_ple(config)
    if (size := config.draft_vocab_size) is not None:
        require(1 <= size <= config.vocab_size, "draft_vocab_size", size, f"from 1 to vocab_size ({config.vocab_size})")


def check_draft_head(config: ModelConfig) -> None:
    """Raise `ConfigError` for a draft head of a kind that is not implemented. The model itself can be used without."""
    only = "no other draft head is implemented"
    theta = config.rope_theta
    for name, value, accepted, rule in (
        ("mtp_num_hidden_layers", config.mtp_num_hidden_layers, (1,), "1"),
        ("mtp.layer_types", list(config.mtp_layer_types), ([], [FULL_ATTENTION]), f"[{FULL_ATTENTION!r}]"),
        ("mtp_use_dedicated_embeddings", config.mtp_use_dedicated_embeddings, (False,), "false"),
        ("mtp.rope_theta", config.mtp_rope_theta, (None, theta), f"that of the model ({theta:g})"),
        ("mtp.mtp_use_hidden_state_from_layer", config.mtp_use_hidden_state_from_layer, (None,), "null"),
    ):
        require(value in accepted, name, value, f"{rule}: {only}; build with --draft-head none")


def is_int(value: object) -> bool:
    return type(value) is int


def _is_finite_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(typing.cast(float, value))


def _is_tuple_of(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, tuple) and all(type(item) is kind for item in value)


_TYPE_RULES: dict[Any, tuple[Callable[[object], bool], str]] = {
    int: (is_int, "an integer"),
    int | None: (lambda value: value is None or is_int(value), "an integer or null"),
    float | None: (lambda value: value is None or _is_finite_number(value), "a finite number or null"),
    float: (_is_finite_number, "a finite number"),
    bool: (lambda value: type(value) is bool, "true or false"),
    str: (lambda value: type(value) is str, "a string"),
    tuple[int, ...]: (_is_tuple_of(int), "a list of integers"),
    tuple[str, ...]: (_is_tuple_of(str), "a list of strings"),
}


def _check_types(config: ModelConfig) -> None:
    for name, hint in typing.get_type_hints(type(config)).items():
        accepts, rule = _TYPE_RULES[hint]
        value = getattr(config, name)
        require(accepts(value), name, value, rule)


def _check_smallest(config: ModelConfig, table: dict[str, int]) -> None:
    for name, smallest in table.items():
        value = getattr(config, name)
        require(value >= smallest, name, value, f"at least {smallest}")


def _check_largest(config: ModelConfig) -> None:
    for name, value in vars(config).items():
        if is_int(value) and name != "seed":
            largest = _LARGEST.get(name, _LARGEST_EXTENT)
            require(value <= largest, name, value, f"at most {largest}")


def _check_multiple(config: ModelConfig, name: str, of: str) -> None:
    divisor = getattr(config, of)
    require(getattr(config, name) % divisor == 0, name, getattr(config, name), f"a multiple of {of} ({divisor})")


def _check_attention(config: ModelConfig) -> None:
    layers, count = config.layer_types, config.num_hidden_layers
    require(len(layers) == count, "layer_types", list(layers), f"one entry a layer (num_hidden_layers is {count})")
    for layer, layer_type in enumerate(layers):
        rule = f"{LINEAR_ATTENTION!r} or {FULL_ATTENTION!r}"
        require(layer_type in (LINEAR_ATTENTION, FULL_ATTENTION), f"layer_types[{layer}]", layer_type, rule)
    _check_multiple(config, "num_attention_heads", of="num_key_value_heads")
    _check_multiple(config, "linear_num_value_heads", of="linear_num_key_heads")

    require(config.rope_theta > 0, "rope_theta", config.rope_theta, "positive")
    factor, rotary_dim = config.partial_rotary_factor, config.rotary_dim
    require(0 < factor <= 1, "partial_rotary_factor", factor, "above 0 and at most 1")
    rule = f"such that head_dim ({config.head_dim}) times it is even and at least 2, not {rotary_dim}"
    require(rotary_dim >= 2 and rotary_dim % 2 == 0, "partial_rotary_factor", factor, rule)
    section = config.mrope_section
    require(len(section) == 3 and min(section) >= 0, "mrope_section", list(section), "three counts, none negative")


def _check_moe_and_output(config: ModelConfig) -> None:
    require(config.rms_norm_eps > 0, "rms_norm_eps", config.rms_norm_eps, "positive")
    rule = f"at most num_experts ({config.num_experts})"
    require(config.num_experts_per_tok <= config.num_experts, "num_experts_per_tok", config.num_experts_per_tok, rule)
    gate = config.output_gate_type
    require(gate in ("sigmoid", "silu"), "output_gate_type", gate, "'sigmoid' or 'silu'")
    require(config.dtype in ("bfloat16", "float16", "float32"), "dtype", config.dtype, "bfloat16, float16 or float32")
    eos_ids = list(config.eos_token_ids)
    in_vocab = all(0 <= token_id < config.vocab_size for token_id in eos_ids)
    require(in_vocab, "eos_token_id", eos_ids, f"at least 0 and below vocab_size ({config.vocab_size})")


def _check_indexer(config: ModelConfig) -> None:
    rule = f"positive, or null like all of indexer_{{{', '.join(_INDEXER_KEYS)}}}"
    for name in _INDEXER_FIELDS:
        value = getattr(config, name)
        require(value is not None and value > 0, name, value, rule)
    require(config.indexer_kv_heads == 1, "indexer_kv_heads", config.indexer_kv_heads, "1")
    _check_multiple(config, "indexer_budget", of="indexer_compress_ratio")
    head_dim = config.indexer_head_dim or 0
    rule = f"at least the rotary dim of attention ({config.rotary_dim})"
    require(head_dim >= config.rotary_dim, "indexer_head_dim", head_dim, rule)


def _check_ple(config: ModelConfig) -> None:
    _check_smallest(config, _SMALLEST_WITH_PLE)
    _check_multiple(config, "ple_embed_dim", of="num_ngram_heads")
    ids, count = list(config.ple_layer_ids), config.num_hidden_layers
    require(ids == sorted(set(ids)), "ple_layer_ids", ids, "ascending and without repetition")
    require(ids[0] >= 1 and ids[-1] <= count, "ple_layer_ids", ids, f"one-indexed layers, from 1 to {count}")
    full = [layer_id for layer_id in ids if not config.is_linear(layer_id - 1)]
    require(not full, "ple_layer_ids", ids, f"layers of type {LINEAR_ATTENTION}, which {full} are not")
    eos_ids, rule = list(config.eos_token_ids), "one id or more, not null, because it cuts the n-grams of ple_layer_ids"
    require(len(eos_ids) > 0, "eos_token_id", eos_ids, rule)
