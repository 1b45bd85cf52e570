"""`ModelConfig`: the only reader of Hugging Face config keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from qwen4exp_trt.errors import ConfigError
from qwen4exp_trt.frontend.config_rules import (
    FULL_ATTENTION,
    LINEAR_ATTENTION,
    MAX_NUM_LAYERS,
    check_config,
    is_int,
    require,
)
from qwen4exp_trt.runtime.json_files import read_json_object

MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text", "qwen3_8_flash_next", "qwen3_8_flash_next_text")
"""The public spellings, of the multimodal config and of its text part."""

_FULL_ATTENTION_NAMES = (FULL_ATTENTION, "indexed_attention", "qwen_sparse_attention")

_ONLY_IMPLEMENTED = {"hidden_act": "silu", "attention_bias": False, "per_layer_config": None}
_ONLY_IMPLEMENTED_ROPE = {"rope_type": "default", "mrope_interleaved": True}
"""Keys that change the model and of which one value is implemented, which is also the value of an absent key."""

_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_MROPE_SECTION = (11, 11, 10)
"""What transformers assumes when ``rope_parameters`` leaves them out, whatever the rotary dim."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The text model, in Hugging Face names. Every instance satisfies the model's constraints, or raises `ConfigError`.

    A field without default must be in config.json, where transformers always writes it; the defaults are those of
    transformers.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    layer_types: tuple[str, ...]
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"

    rope_theta: float
    partial_rotary_factor: float
    mrope_section: tuple[int, ...]
    """Any three counts, as in transformers: frequencies beyond a count follow the temporal axis, whose count is unused,
    and counts beyond the frequencies have no effect."""

    linear_conv_kernel_dim: int
    linear_key_head_dim: int
    linear_value_head_dim: int
    linear_num_key_heads: int
    linear_num_value_heads: int
    output_gate_type: str

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int
    norm_topk_prob: bool = True

    hc_count: int
    hc_lowrank: int

    ple_layer_ids: tuple[int, ...]
    """One-indexed, ascending; ``ple_layers`` has them zero-based."""
    ple_embed_dim: int
    ple_conv_kernel_size: int = 4
    ngram_size: int = 3
    heads_per_ngram: int = 8
    ngram_vocab_size_base: int = 20_000_000
    make_ngram_vocab_size_divisible_by: int = 128
    split_ngram_parts: int = 512
    seed: int = 1234

    indexer_n_heads: int | None = None
    indexer_kv_heads: int | None = None
    indexer_head_dim: int | None = None
    indexer_budget: int | None = None
    indexer_compress_ratio: int | None = None

    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None

    mtp_num_hidden_layers: int = 0
    """Layers of the draft head (multi-token prediction); 0 without one. `check_draft_head` says what is implemented."""
    mtp_layer_types: tuple[str, ...] = ()
    """Of those layers; all full attention where the config says nothing."""
    mtp_use_dedicated_embeddings: bool = False
    mtp_rope_theta: float | None = None
    """None for ``rope_theta``."""
    mtp_use_hidden_state_from_layer: int | None = None
    """None for the stack behind the last layer."""
    draft_vocab_size: int | None = None
    """Rows of the draft head's own ``lm_head``, of which a build chooses the ids; None: it uses that of the model."""

    def __post_init__(self) -> None:
        check_config(self)

    @property
    def rotary_dim(self) -> int:
        """Leading dims of a head that RoPE rotates."""
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def stack_width(self) -> int:
        """Width of the residual stack: all hyper-connection streams side by side."""
        return self.hc_count * self.hidden_size

    @property
    def linear_key_dim(self) -> int:
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def linear_value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @property
    def linear_conv_dim(self) -> int:
        """Channels of a Gated DeltaNet convolution: q, k and v."""
        return 2 * self.linear_key_dim + self.linear_value_dim

    @property
    def ple_layers(self) -> tuple[int, ...]:
        """Zero-based layers that add an n-gram embedding, ascending."""
        return tuple(layer_id - 1 for layer_id in self.ple_layer_ids)

    @property
    def num_ngram_heads(self) -> int:
        """Hashed rows a token: ``heads_per_ngram`` for each n-gram length from 2 to ``ngram_size``."""
        return (self.ngram_size - 1) * self.heads_per_ngram

    @property
    def ngram_head_dim(self) -> int:
        return self.ple_embed_dim // self.num_ngram_heads

    @property
    def ngram_eos_token_id(self) -> int:
        """The token that cuts n-grams; only a config with PLE is sure to have one."""
        return self.eos_token_ids[0]

    @property
    def has_indexer(self) -> bool:
        """Whether full attention selects tokens (QSA); without an indexer it is dense."""
        return self.indexer_budget is not None

    @property
    def has_draft_head(self) -> bool:
        return self.mtp_num_hidden_layers > 0

    @property
    def draft_layer(self) -> int:
        """The number of the draft head's layer: the one behind the model's last."""
        return self.num_hidden_layers

    def is_linear(self, layer: int) -> bool:
        return layer != self.draft_layer and self.layer_types[layer] == LINEAR_ATTENTION

    def without_draft_head(self) -> ModelConfig:
        return replace(
            self,
            mtp_num_hidden_layers=0,
            mtp_layer_types=(),
            mtp_use_dedicated_embeddings=False,
            mtp_rope_theta=None,
            mtp_use_hidden_state_from_layer=None,
            draft_vocab_size=None,
        )

    @classmethod
    def from_dir(cls, path: str | Path) -> ModelConfig:
        """Read ``config.json`` of a checkpoint folder."""
        folder = Path(path)
        if not folder.is_dir():
            raise ConfigError(f"{folder}: no such folder; give the folder that holds the checkpoint's config.json")
        return cls.from_file(folder / "config.json")

    @classmethod
    def from_file(cls, path: str | Path) -> ModelConfig:
        """Read a config.json."""
        return cls.from_dict(read_json_object(Path(path), ConfigError), str(path))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str) -> ModelConfig:
        """Read a parsed config.json; ``where`` names it in messages."""
        try:
            return cls(**_fields_from_hf(data))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The config as a flat Hugging Face text config, which `from_dict` reads back to an equal one."""
        data = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        rope = {name: data.pop(name) for name in ("rope_theta", "partial_rotary_factor", "mrope_section")}
        eos_token_ids = data.pop("eos_token_ids")
        return {
            "model_type": "qwen4_exp_text",
            **data,
            "eos_token_id": eos_token_ids or None,
            "rope_parameters": _ONLY_IMPLEMENTED_ROPE | rope,
        }


def _fields_from_hf(data: Any) -> dict[str, Any]:
    """The fields of `ModelConfig` from a nested or flat Hugging Face config; `ModelConfig` itself checks them."""
    text = _text_config(data)
    for key, value in _ONLY_IMPLEMENTED.items():
        require(text.get(key, value) == value, key, text.get(key), f"{value!r}: no other value is implemented")
    values = {field.name: text[field.name] for field in fields(ModelConfig) if field.name in text}
    values |= _rope_fields(text)
    values["ple_layer_ids"] = tuple(sorted(set(_ints_from("ple_layer_ids", text.get("ple_layer_ids")))))
    values["eos_token_ids"] = _ints_from("eos_token_id", text.get("eos_token_id"))
    if text.get("ple_embed_dim") is None:
        values["ple_embed_dim"] = text.get("hidden_size")
    if text.get("output_gate_type") is None:
        values["output_gate_type"] = _ONLY_IMPLEMENTED["hidden_act"]
    values["layer_types"] = _layer_types(text)
    values |= _draft_head_fields(text)
    missing = [field.name for field in fields(ModelConfig) if field.default is MISSING and field.name not in values]
    if missing:
        raise ConfigError(f"the text config lacks {', '.join(missing)}")
    return values


def _text_config(data: Any) -> dict[str, Any]:
    """The flat text config, with what the multimodal config around it decides for the text model."""
    require(isinstance(data, Mapping), "the config", type(data).__name__, "a JSON object")
    require(data.get("model_type") in MODEL_TYPES, "model_type", data.get("model_type"), f"one of {MODEL_TYPES}")
    text = data.get("text_config", data)
    require(isinstance(text, Mapping), "text_config", text, "a JSON object")
    model_type = text.get("model_type", MODEL_TYPES[0])
    require(model_type in MODEL_TYPES, "text_config.model_type", model_type, f"one of {MODEL_TYPES}")
    dtypes = (holder.get(key) for holder in (text, data) for key in ("dtype", "torch_dtype"))
    dtype = next((dtype for dtype in dtypes if dtype is not None), ModelConfig.dtype)
    tie_word_embeddings = data.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
    return {**text, "dtype": dtype, "tie_word_embeddings": tie_word_embeddings}


def _ints_from(key: str, value: Any) -> tuple[int, ...]:
    """An id, a list of ids or null, as a tuple."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    require(all(is_int(item) for item in ids), key, value, "integers")
    return tuple(ids)


def _layer_types(text: Mapping[str, Any]) -> tuple[str, ...]:
    names = text.get("layer_types")
    if names is None:
        count, interval = text.get("num_hidden_layers", 0), text.get("full_attention_interval", 4)
        require(is_int(count), "num_hidden_layers", count, "an integer")
        require(is_int(interval) and interval > 0, "full_attention_interval", interval, "a positive integer")
        layers = range(min(count, MAX_NUM_LAYERS))  # no more are allowed, and 10**9 would take forever
        return tuple(FULL_ATTENTION if (layer + 1) % interval == 0 else LINEAR_ATTENTION for layer in layers)
    return _canonical_layer_types("layer_types", names)


def _canonical_layer_types(key: str, names: Any) -> tuple[str, ...]:
    require(isinstance(names, list), key, names, "a list")
    return tuple(FULL_ATTENTION if name in _FULL_ATTENTION_NAMES else name for name in names)


def _draft_head_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the draft head, from flat ``mtp_*`` keys or from the object ``mtp``, whose keys lack the prefix."""
    nested = text.get("mtp") or {}
    require(isinstance(nested, Mapping), "mtp", nested, "a JSON object")
    found = {f"mtp_{key.removeprefix('mtp_')}": value for key, value in nested.items()}
    found |= {key: value for key, value in text.items() if key.startswith("mtp_")}
    values = {field.name: found[field.name] for field in fields(ModelConfig) if found.get(field.name) is not None}
    if "mtp_layer_types" in values:
        values["mtp_layer_types"] = _canonical_layer_types("mtp.layer_types", values["mtp_layer_types"])
    return values


def _rope_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    """Keys inside ``rope_scaling`` or ``rope_parameters`` go before the same keys next to it, as in transformers."""
    key = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    rope = text.get(key) or {}
    require(isinstance(rope, Mapping), key, rope, "a JSON object")
    rope = {"rope_type": rope.get("type", "default"), **rope}
    for name, value in rope.items():
        require(not isinstance(value, Mapping), f"{key}.{name}", value, "one value for all layers")
        rule = f"{_ONLY_IMPLEMENTED_ROPE.get(name)!r}: no other value is implemented"
        require(value == _ONLY_IMPLEMENTED_ROPE.get(name, value), f"{key}.{name}", value, rule)
    section = rope.get("mrope_section", _DEFAULT_MROPE_SECTION)
    return {
        "rope_theta": rope.get("rope_theta", text.get("rope_theta", _DEFAULT_ROPE_THETA)),
        "partial_rotary_factor": rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0)),
        "mrope_section": tuple(section) if isinstance(section, list) else section,
    }
