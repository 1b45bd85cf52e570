"""The one list of the model's external states."""

from __future__ import annotations

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.runtime.limits import DRAFT_ROWS
from qwen4exp_trt.runtime.specs import DTYPE_BYTES, NUM_BLOCKS, NUM_SLOTS, StateKind, StateSpec


def state_specs(
    config: ModelConfig, dtype: str, block_size: int, kv_cache_dtype: str = "auto"
) -> tuple[StateSpec, ...]:
    """Every state of the model in layer order.

    ``dtype`` is the activation dtype (``bfloat16`` or ``float32``), and so is ``kv_cache_dtype`` when it is ``auto``;
    else it is ``float8_e4m3fn``. ``block_size`` counts the tokens of a page of the KV cache and must be a multiple of
    ``indexer_compress_ratio``. The rings of raw index keys keep the open group even when ``DRAFT_ROWS`` tokens behind
    it are taken back.
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


def resolve_kv_dtype(dtype: str, kv_cache_dtype: str) -> str:
    """The dtype of the KV cache beside activations of ``dtype``; ``kv_cache_dtype`` as in `state_specs`."""
    assert kv_cache_dtype in ("auto", "float8_e4m3fn"), kv_cache_dtype
    return dtype if kv_cache_dtype == "auto" else kv_cache_dtype


def _ple_states(config: ModelConfig, layer: int, dtype: str) -> list[StateSpec]:
    ids_shape = (NUM_SLOTS, config.ngram_size - 1 + DRAFT_ROWS)
    rows = (config.ple_conv_kernel_size - 1) * config.ngram_size + DRAFT_ROWS
    conv_shape = (NUM_SLOTS, rows, config.stack_width)
    return [
        _state("ple", layer, StateKind.NGRAM_IDS, ids_shape, "int32", init=config.ngram_eos_token_id),
        _state("ple", layer, StateKind.PLE_CONV_STATE, conv_shape, dtype),
    ]


def _linear_attention_states(config: ModelConfig, layer: int, dtype: str) -> list[StateSpec]:
    conv_shape = (NUM_SLOTS, config.linear_conv_kernel_dim - 1, config.linear_conv_dim)
    heads, key_dim, value_dim = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    return [
        _state("linear_attn", layer, StateKind.CONV_STATE, conv_shape, dtype),
        _state("linear_attn", layer, StateKind.RECURRENT_STATE, (NUM_SLOTS, heads, key_dim, value_dim), "float32"),
    ]


def _full_attention_states(
    config: ModelConfig, layer: int, dtype: str, kv_dtype: str, block_size: int
) -> list[StateSpec]:
    kv_shape = (NUM_BLOCKS, 2, block_size, config.num_key_value_heads, config.head_dim)
    states = [_state("self_attn", layer, StateKind.KV_CACHE, kv_shape, kv_dtype)]
    if config.indexer_compress_ratio is not None and config.indexer_head_dim is not None:
        ratio, head_dim = config.indexer_compress_ratio, config.indexer_head_dim
        ring_rows = ratio - 1 + DRAFT_ROWS
        assert block_size % ratio == 0, (block_size, ratio)
        prefix = "self_attn.indexer"
        states += [
            _state(prefix, layer, StateKind.INDEX_K_CACHE, (NUM_BLOCKS, block_size // ratio, head_dim), dtype),
            _state(prefix, layer, StateKind.INDEX_K_RING, (NUM_SLOTS, ring_rows, head_dim), dtype),
            _state(prefix, layer, StateKind.INDEX_POSITION_RING, (NUM_SLOTS, ring_rows, 3), "int32"),
        ]
    return states


def _state(
    module: str, layer: int, kind: StateKind, shape: tuple[int | str, ...], dtype: str, init: int = 0
) -> StateSpec:
    return StateSpec(f"layers.{layer}.{module}.{kind.value}", kind, layer, shape, dtype, init)


def draft_row_bytes(spec: StateSpec) -> int:
    """Bytes to keep of each row that verifies a draft, so that the state can follow however many rows are accepted.

    The paged caches and the rings need none: what rejected rows wrote is overwritten by the rows at their positions.
    """
    width = spec.shape[-1]
    assert isinstance(width, int)
    row_bytes = width * DTYPE_BYTES[spec.dtype]
    match spec.kind:
        case StateKind.CONV_STATE:
            # Its inputs, of which the state is the last ones, and its outputs, from which the recurrence is repeated.
            return 2 * row_bytes
        case StateKind.RECURRENT_STATE:
            # g and beta of each head: repeating the recurrence needs these and q, k and v.
            _, heads, _, _ = spec.shape
            assert isinstance(heads, int)
            return 2 * heads * DTYPE_BYTES["float32"]
        case _:
            return 0
