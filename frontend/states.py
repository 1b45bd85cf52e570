"""The one list of the model's external states, and that of its draft head."""

from __future__ import annotations

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.runtime.limits import DRAFT_ROWS
from qwen4exp_trt.runtime.specs import NUM_BLOCKS, NUM_SLOTS, StateKind, StateSpec

RINGS = (
    StateKind.CONV_STATE,
    StateKind.INDEX_K_RING,
    StateKind.INDEX_POSITION_RING,
    StateKind.PLE_CONV_STATE,
    StateKind.NGRAM_IDS,
)
"""States ``[num_slots, R, ...]`` in which the token at position p has row p % R."""


def state_specs(
    config: ModelConfig, dtype: str, block_size: int, kv_cache_dtype: str = "auto"
) -> tuple[StateSpec, ...]:
    """Every state of the model in layer order.

    ``dtype`` is the activation dtype (``bfloat16`` or ``float32``), and so is ``kv_cache_dtype`` when it is ``auto``;
    else it is ``float8_e4m3fn``. ``block_size`` counts the tokens of a page of the KV cache and must be a multiple of
    ``indexer_compress_ratio``. Rings have `DRAFT_ROWS` more rows than an op looks back, so that as many tokens can be
    taken back.
    """
    kv_dtype = resolve_kv_dtype(dtype, kv_cache_dtype)
    states: list[StateSpec] = []
    for layer in range(config.num_hidden_layers):
        if layer in config.ple_layers:
            states += _ple_states(config, layer, dtype)
        if config.is_linear(layer):
            states += _linear_attention_states(config, layer, dtype)
        else:
            states += _full_attention_states(config, layer, dtype, kv_dtype, block_size)
    return tuple(states)


def draft_state_specs(
    config: ModelConfig, dtype: str, block_size: int, kv_cache_dtype: str = "auto"
) -> tuple[StateSpec, ...]:
    """Every state of the draft head, with the arguments of `state_specs`; their names are none of the model's."""
    kv_dtype = resolve_kv_dtype(dtype, kv_cache_dtype)
    return tuple(_full_attention_states(config, config.draft_layer, dtype, kv_dtype, block_size))


def resolve_kv_dtype(dtype: str, kv_cache_dtype: str) -> str:
    """The dtype of the KV cache beside activations of ``dtype``; ``kv_cache_dtype`` as in `state_specs`."""
    assert kv_cache_dtype in ("auto", "float8_e4m3fn"), kv_cache_dtype
    return dtype if kv_cache_dtype == "auto" else kv_cache_dtype


def _ple_states(config: ModelConfig, layer: int, dtype: str) -> list[StateSpec]:
    ids_shape = (NUM_SLOTS, config.ngram_size - 1 + DRAFT_ROWS)
    rows = (config.ple_conv_kernel_size - 1) * config.ngram_size + DRAFT_ROWS
    conv_shape = (NUM_SLOTS, rows, config.stack_width)
    return [
        _state(config, "ple", layer, StateKind.NGRAM_IDS, ids_shape, "int32", init=config.ngram_eos_token_id),
        _state(config, "ple", layer, StateKind.PLE_CONV_STATE, conv_shape, dtype),
    ]


def _linear_attention_states(config: ModelConfig, layer: int, dtype: str) -> list[StateSpec]:
    heads, key_dim, value_dim = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    conv_rows = config.linear_conv_kernel_dim - 1 + DRAFT_ROWS
    draft_width = config.linear_num_key_heads * key_dim + heads * value_dim + 2 * heads
    shapes: dict[StateKind, tuple[tuple[int, ...], str]] = {
        StateKind.CONV_STATE: ((conv_rows, config.linear_conv_dim), dtype),
        StateKind.RECURRENT_STATE: ((heads, key_dim, value_dim), "float32"),
        StateKind.DRAFT_ROWS: ((2 * DRAFT_ROWS, draft_width), dtype),
        StateKind.COMMITTED_LEN: ((2,), "int32"),
    }
    return [
        _state(config, "linear_attn", layer, kind, (NUM_SLOTS, *row), dtype) for kind, (row, dtype) in shapes.items()
    ]


def _full_attention_states(
    config: ModelConfig, layer: int, dtype: str, kv_dtype: str, block_size: int
) -> list[StateSpec]:
    kv_shape = (NUM_BLOCKS, 2, block_size, config.num_key_value_heads, config.head_dim)
    states = [_state(config, "self_attn", layer, StateKind.KV_CACHE, kv_shape, kv_dtype)]
    if config.indexer_compress_ratio is not None and config.indexer_head_dim is not None:
        ratio, head_dim = config.indexer_compress_ratio, config.indexer_head_dim
        ring_rows = ratio - 1 + DRAFT_ROWS
        assert block_size % ratio == 0, (block_size, ratio)
        prefix = "self_attn.indexer"
        states += [
            _state(config, prefix, layer, StateKind.INDEX_K_CACHE, (NUM_BLOCKS, block_size // ratio, head_dim), dtype),
            _state(config, prefix, layer, StateKind.INDEX_K_RING, (NUM_SLOTS, ring_rows, head_dim), dtype),
            _state(config, prefix, layer, StateKind.INDEX_POSITION_RING, (NUM_SLOTS, ring_rows, 3), "int32"),
        ]
    return states


def _state(
    config: ModelConfig,
    module: str,
    layer: int,
    kind: StateKind,
    shape: tuple[int | str, ...],
    dtype: str,
    init: int = 0,
) -> StateSpec:
    owner = "mtp.layers.0" if layer == config.draft_layer else f"layers.{layer}"
    return StateSpec(f"{owner}.{module}.{kind.value}", kind, layer, shape, dtype, init)
