"""The weights of the model under their canonical names, and how a checkpoint of any public layout provides them.

A canonical name is the Hugging Face name without prefix: ``layers.3.self_attn.q_proj.weight``, or of the draft head
``mtp.layers.0.self_attn.q_proj.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.ngram import ngram_hash
from qwen4exp_trt.frontend.quantized_weights import check_quantization_config
from qwen4exp_trt.frontend.stored_tensors import Problem, StoredTensors
from qwen4exp_trt.frontend.stored_weights import Shape, StoredWeight, concat_shards, select_rows, stack_experts
from qwen4exp_trt.runtime.checkpoint import Checkpoint
from qwen4exp_trt.runtime.specs import Source

EMBED_TOKENS = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
DRAFT_LM_HEAD = "mtp.lm_head.weight"
"""Some rows of `LM_HEAD`, for a draft head with a vocabulary of its own; in no checkpoint."""


@dataclass(frozen=True)
class ResolvedWeights:
    """How a checkpoint provides the weights of a config."""

    weights: dict[str, StoredWeight]
    """By canonical name, in the order of `expected_weights`."""
    set_aside: dict[str, list[str]]
    """Checkpoint tensors that no recipe reads: ``mtp`` (of a draft head that is not asked for), ``vision``, ``unused``
    (statistics, stray copies) and ``activation scales``."""


def expected_weights(config: ModelConfig) -> dict[str, Shape]:
    """Canonical name -> shape of every weight of the text model, and of its draft head if it has one."""
    table = (config.vocab_size, config.hidden_size)
    shapes = {EMBED_TOKENS: table, LM_HEAD: table} | _under("hyper_connection_mixer", _hc_read_shapes(config))
    for layer in range(config.num_hidden_layers):
        shapes |= _under(f"layers.{layer}", _layer_shapes(config, layer))
    return shapes | (_under("mtp", _draft_head_shapes(config)) if config.has_draft_head else {})


def is_of_draft_head(name: str) -> bool:
    """Whether a canonical name is of a weight that only the draft head uses."""
    return name.startswith("mtp.")


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


def _draft_head_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {
        "fc_embedding.weight": (hidden, hidden),
        "fc_hidden.weight": (hidden, hidden),
        "pre_fc_norm_embedding.weight": (hidden,),
        "pre_fc_norm_hidden.weight": (config.stack_width,),
    }
    shapes |= _under("layers.0", _layer_shapes(config, config.draft_layer))
    shapes |= _under("hyper_connection_mixer", _hc_read_shapes(config))
    if config.draft_vocab_size is not None:
        shapes |= {DRAFT_LM_HEAD.removeprefix("mtp."): (config.draft_vocab_size, hidden)}
    return shapes


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


def resolve_weights(
    config: ModelConfig, checkpoint: Checkpoint, draft_token_ids: Sequence[int] | None = None
) -> ResolvedWeights:
    """Find every expected weight in ``checkpoint``, whatever format each is stored in.

    ``draft_token_ids`` are the rows of `DRAFT_LM_HEAD`, as many as the config's ``draft_vocab_size``.

    Reads the headers, the integers of the n-gram hash and all scales but NVFP4's block scales, which are checked when
    they are read. Raises one `CheckpointError` that lists all tensors that are missing, unexpected, of
    another shape or dtype, or stored under two names, scales that are missing, without a weight, or not positive and
    finite, and hash constants other than the config's. A quantization config that names a format we do not know is
    refused at once.
    """
    check_quantization_config(checkpoint.path)
    tensors = StoredTensors(checkpoint, config.has_draft_head)
    shapes = expected_weights(config)
    weights = {name: _resolve(tensors, config, name, shape) for name, shape in shapes.items() if name != DRAFT_LM_HEAD}
    if DRAFT_LM_HEAD in shapes:
        assert draft_token_ids is not None and len(draft_token_ids) == config.draft_vocab_size
        weights[DRAFT_LM_HEAD] = select_rows(weights[LM_HEAD], draft_token_ids)
    _check_hash_constants(tensors, config)
    tensors.raise_problems()
    return ResolvedWeights(weights, tensors.set_aside)


def _resolve(tensors: StoredTensors, config: ModelConfig, name: str, shape: Shape) -> StoredWeight:
    if name in tensors.stored:
        return tensors.claim(name, shape)
    if config.tie_word_embeddings and name in (EMBED_TOKENS, LM_HEAD):
        return tensors.claim(LM_HEAD if name == EMBED_TOKENS else EMBED_TOKENS, shape)
    weight = None
    if ".experts." in name:
        weight = _stack_experts(tensors, name, shape)
    elif name.endswith("ngram_embedding.weight"):
        weight = _concat_shards(tensors, name, shape)
    return weight or tensors.claim(name, shape)


def _stack_experts(tensors: StoredTensors, name: str, shape: Shape) -> StoredWeight | None:
    """``experts.gate_up_proj`` or ``experts.down_proj`` from one tensor an expert; None where there is not one."""
    experts, leaf = name.rsplit(".", 1)
    num_experts, rows, columns = shape
    projections = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
    names = [[f"{experts}.{e}.{projection}.weight" for projection in projections] for e in range(num_experts)]
    if not any(part in tensors.stored for parts in names for part in parts):
        return None
    part_shape = (rows // len(projections), columns)
    return stack_experts([[tensors.claim(part, part_shape) for part in parts] for parts in names])


def _concat_shards(tensors: StoredTensors, name: str, shape: Shape) -> StoredWeight | None:
    """The n-gram table from ``shard_{k}.weight``, in the order of ``k``; None where there is no shard."""
    pattern = re.compile(re.escape(name.removesuffix("weight")) + r"shard_(\d+)\.weight")
    shards = {int(match[1]): match[0] for match in map(pattern.fullmatch, tensors.stored) if match}
    if not shards:
        return None
    names = [shards.get(k, name.replace("weight", f"shard_{k}.weight")) for k in range(len(shards))]
    claimed = [tensors.claim(shard, None) for shard in names]
    found = [weight.shape for shard, weight in zip(names, claimed, strict=True) if shard in tensors.stored]
    rows = sum(shard_shape[0] for shard_shape in found)
    if rows != shape[0] or any(shard_shape[1:] != shape[1:] for shard_shape in found):
        shards_found = f"{name} {len(found)} shards of {rows} rows"
        tensors.note(Problem.WRONG_SHAPE, f"{shards_found} instead of {list(shape)}")
        return StoredWeight(shape, Source(name))
    return concat_shards(claimed)


def _check_hash_constants(tensors: StoredTensors, config: ModelConfig) -> None:
    for layer in config.ple_layers:
        constants = ngram_hash(config, layer)
        embedding = f"layers.{layer}.ple.ple_embedding"
        tensors.claim_constants(f"{embedding}.layer_multipliers", constants.multipliers)
        tensors.claim_constants(f"{embedding}.ngram_heads_vocab_sizes", constants.vocab_sizes)
        tensors.claim_constants(f"{embedding}.ngram_heads_offsets", constants.offsets)
