"""The weights of the model under their canonical names, and how a checkpoint of any public layout provides them.

A canonical name is the Hugging Face name without prefix: ``layers.3.self_attn.q_proj.weight``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from qwen4exp_trt.errors import CheckpointError
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.ngram import ngram_hash
from qwen4exp_trt.runtime.checkpoint import Checkpoint, listing
from qwen4exp_trt.runtime.specs import Source, WeightRecipe
from qwen4exp_trt.runtime.weights import transform

Shape = tuple[int, ...]

EMBED_TOKENS = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.", "")
_FLOAT_DTYPES = ("BF16", "F16", "F32")
_SET_ASIDE = {
    "mtp": re.compile(r"^mtp\."),
    "vision": re.compile(r"^(model\.)?visual\."),
    "unused": re.compile(r"\b(hashstats_\w+|token_lookup|hyper_connection_mixer\.block_inject_weight)\b"),
}
"""Checkpoint tensors that the text model does not have, by what they belong to."""


@dataclass(frozen=True)
class ResolvedWeights:
    """How a checkpoint provides the weights of a config."""

    recipes: dict[str, WeightRecipe]
    """Canonical name -> recipe over tensors of the checkpoint, in the order of `expected_weights`."""
    set_aside: dict[str, list[str]]
    """Checkpoint tensors of no use to the text model: ``mtp``, ``vision`` and ``unused`` (statistics, stray copies)."""


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


def resolve_weights(config: ModelConfig, checkpoint: Checkpoint) -> ResolvedWeights:
    """Find every expected weight in ``checkpoint``, reading its headers (and the few integers of the n-gram hash).

    Raises one `CheckpointError` that lists all tensors that are missing, unexpected, of another shape or dtype, or
    stored under two names, and hash constants other than the config's.
    """
    tensors = _CheckpointTensors(checkpoint)
    recipes = {name: _resolve(tensors, config, name, shape) for name, shape in expected_weights(config).items()}
    _check_hash_constants(tensors, config)
    tensors.raise_problems()
    return ResolvedWeights(recipes, tensors.set_aside)


class _CheckpointTensors:
    """The tensors of a checkpoint by canonical name: which of them are claimed, and what is wrong with them."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.stored: dict[str, str] = {}
        self.set_aside: dict[str, list[str]] = {kind: [] for kind in _SET_ASIDE}
        self.missing: list[str] = []
        self.wrong_shape: list[str] = []
        self.wrong_dtype: list[str] = []
        self.wrong_constant: list[str] = []
        self._claimed: set[str] = set()
        self._twice: list[str] = []
        for name in checkpoint.names:
            self._add(name)

    def _add(self, name: str) -> None:
        kind = next((kind for kind, pattern in _SET_ASIDE.items() if pattern.search(name)), None)
        if kind is not None:
            self.set_aside[kind].append(name)
            return
        canonical = name.removeprefix(next(prefix for prefix in _PREFIXES if name.startswith(prefix)))
        if canonical in self.stored:
            self._twice.append(f"{self.stored[canonical]} and {name}")
        self.stored[canonical] = name

    def claim(self, canonical: str, shape: Shape | None) -> Source:
        """The source of a float weight, noting what is wrong with it; ``shape`` None leaves that to the caller."""
        name = self.stored.get(canonical)
        if name is None:
            self.missing.append(canonical)
            return Source(canonical)
        self._claimed.add(canonical)
        found, dtype = self.checkpoint.shape(name), self.checkpoint.dtype(name)
        if dtype not in _FLOAT_DTYPES:
            self.wrong_dtype.append(f"{name} {dtype}")
        elif shape is not None and found != shape:
            self.wrong_shape.append(f"{name} {list(found)} instead of {list(shape)}")
        return Source(name)

    def claim_constants(self, canonical: str, values: tuple[int, ...]) -> None:
        """Compare an int64 tensor with ``values``, if the checkpoint has it."""
        name = self.stored.get(canonical)
        if name is None:
            return
        self._claimed.add(canonical)
        if self.checkpoint.dtype(name) != "I64":
            self.wrong_dtype.append(f"{name} {self.checkpoint.dtype(name)} instead of I64")
        elif (found := self.checkpoint.tensor(name).flatten().tolist()) != list(values):
            self.wrong_constant.append(f"{name} {found} instead of {list(values)}")

    def raise_problems(self) -> None:
        problems = {
            "missing": self.missing,
            "unexpected": [name for canonical, name in self.stored.items() if canonical not in self._claimed],
            "wrong shape": self.wrong_shape,
            f"wrong dtype, weights are {', '.join(_FLOAT_DTYPES)}": self.wrong_dtype,
            "wrong hash constants": self.wrong_constant,
            "one weight under two names": self._twice,
        }
        found = [f"{problem} ({len(names)}): {listing(names)}" for problem, names in problems.items() if names]
        if found:
            raise CheckpointError(f"{self.checkpoint.path} does not match its config. {'; '.join(found)}")


def _resolve(tensors: _CheckpointTensors, config: ModelConfig, name: str, shape: Shape) -> WeightRecipe:
    if name in tensors.stored:
        return tensors.claim(name, shape)
    if config.tie_word_embeddings and name in (EMBED_TOKENS, LM_HEAD):
        return tensors.claim(LM_HEAD if name == EMBED_TOKENS else EMBED_TOKENS, shape)
    recipe = None
    if ".experts." in name:
        recipe = _stack_experts(tensors, name, shape)
    elif name.endswith("ngram_embedding.weight"):
        recipe = _concat_shards(tensors, name, shape)
    return recipe or tensors.claim(name, shape)


def _stack_experts(tensors: _CheckpointTensors, name: str, shape: Shape) -> WeightRecipe | None:
    """``experts.gate_up_proj`` or ``experts.down_proj`` from one tensor an expert; None where there is not one."""
    experts, leaf = name.rsplit(".", 1)
    num_experts, rows, columns = shape
    projections = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
    names = [[f"{experts}.{e}.{projection}.weight" for projection in projections] for e in range(num_experts)]
    if not any(part in tensors.stored for parts in names for part in parts):
        return None
    part_shape = (rows // len(projections), columns)
    sources = [[tensors.claim(part, part_shape) for part in parts] for parts in names]
    return transform("stack", *(_concat_rows(parts) for parts in sources))


def _concat_shards(tensors: _CheckpointTensors, name: str, shape: Shape) -> WeightRecipe | None:
    """The n-gram table from ``shard_{k}.weight``, in the order of ``k``; None where there is no shard."""
    pattern = re.compile(re.escape(name.removesuffix("weight")) + r"shard_(\d+)\.weight")
    shards = {int(match[1]): match[0] for match in map(pattern.fullmatch, tensors.stored) if match}
    if not shards:
        return None
    names = [shards.get(k, name.replace("weight", f"shard_{k}.weight")) for k in range(len(shards))]
    sources = [tensors.claim(shard, None) for shard in names]
    found = [tensors.checkpoint.shape(tensors.stored[shard]) for shard in names if shard in tensors.stored]
    rows = sum(shard_shape[0] for shard_shape in found)
    if rows != shape[0] or any(shard_shape[1:] != shape[1:] for shard_shape in found):
        tensors.wrong_shape.append(f"{name} {len(found)} shards of {rows} rows instead of {list(shape)}")
    return _concat_rows(sources)


def _concat_rows(parts: list[Source]) -> WeightRecipe:
    return parts[0] if len(parts) == 1 else transform("concat", *parts, dim=0)


def _check_hash_constants(tensors: _CheckpointTensors, config: ModelConfig) -> None:
    for layer in config.ple_layers:
        constants = ngram_hash(config, layer)
        embedding = f"layers.{layer}.ple.ple_embedding"
        tensors.claim_constants(f"{embedding}.layer_multipliers", constants.multipliers)
        tensors.claim_constants(f"{embedding}.ngram_heads_vocab_sizes", constants.vocab_sizes)
        tensors.claim_constants(f"{embedding}.ngram_heads_offsets", constants.offsets)
