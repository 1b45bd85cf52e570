"""Tiny random qwen4_exp models with every mechanism on, as Hugging Face config dicts and checkpoints."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import torch
from draft_head_reference import DraftHeadReference
from safetensors.torch import load_file, save_file
from torch import Tensor

_NORM_GAIN_STD = 0.3
"""Spread of the learned norm gains: large enough that a dropped gain or a dropped ``1 +`` shows in the logits."""

_WEIGHT_GAIN = {
    "block_inject_weight": 4.0,
    "input_mix_weight_down": 4.0,
    "input_mix_weight_up": 2.0,
    "in_proj_a": 2.0,
    "in_proj_b": 2.0,
    "mlp.gate.": 4.0,
    "shared_expert_gate": 2.0,
    "index_qk_proj": 2.0,
    "ple.key_proj": 2.0,
}
"""Standard deviations, in units of ``1/sqrt(fan_in)``, of the projections whose outputs enter a gate or a selection."""


def tiny_config_dict(**overrides: Any) -> dict[str, Any]:
    """A flat Hugging Face text config; ``overrides`` replace its keys. All extents that could be confused differ."""
    config: dict[str, Any] = {
        "model_type": "qwen4_exp_text",
        "vocab_size": 96,
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "attention_bias": False,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "output_gate_type": "sigmoid",
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 48,
        "norm_topk_prob": True,
        "hc_count": 4,
        "hc_lowrank": 16,
        "ple_layer_ids": [2],
        "ple_embed_dim": 64,
        "ple_conv_kernel_size": 4,
        "ngram_size": 3,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 50,
        "make_ngram_vocab_size_divisible_by": 32,
        "split_ngram_parts": 4,
        "seed": 1234,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 16,
        "indexer_compress_ratio": 4,
        "bos_token_id": 3,
        "eos_token_id": 3,
        "pad_token_id": None,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    return config | overrides


def nested_config_dict(text_config: dict[str, Any]) -> dict[str, Any]:
    """``text_config`` inside a multimodal config with a vision tower of two tiny blocks."""
    vision_config = {
        "model_type": "qwen4_exp_vision",
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": text_config["hidden_size"],
        "num_position_embeddings": 16,
    }
    vocab_size = text_config["vocab_size"]
    token_ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    return {
        "model_type": "qwen4_exp",
        "text_config": text_config,
        "vision_config": vision_config,
        "tie_word_embeddings": text_config["tie_word_embeddings"],
        "dtype": text_config["dtype"],
    } | {name: vocab_size - 1 - i for i, name in enumerate(token_ids)}


def build_hf_model(config_dict: dict[str, Any], seed: int = 0, dtype: str = "float32") -> Any:
    """The transformers model of a flat (``ForCausalLM``) or nested (``ForConditionalGeneration``) config, eager
    attention, eval mode, every parameter randomised from ``seed`` so that each term of the model matters."""
    from transformers.models.qwen4_exp import configuration_qwen4_exp, modeling_qwen4_exp

    is_nested = "text_config" in config_dict
    config_class = "Qwen4ExpConfig" if is_nested else "Qwen4ExpTextConfig"
    model_class = "Qwen4ExpForConditionalGeneration" if is_nested else "Qwen4ExpForCausalLM"
    config = getattr(configuration_qwen4_exp, config_class).from_dict(copy.deepcopy(config_dict))
    config._attn_implementation = "eager"
    model = getattr(modeling_qwen4_exp, model_class)(config)
    randomize_parameters(model, seed)
    return model.to(getattr(torch, dtype)).eval()


def write_hf_checkpoint(path: Path, config_dict: dict[str, Any], seed: int = 0, dtype: str = "float32") -> Any:
    """Save `build_hf_model` to ``path`` as transformers writes it (config.json, safetensors), and return the model.

    A config with ``mtp_num_hidden_layers`` gets the tensors of a draft head as well, of which transformers has none.
    """
    model = build_hf_model(config_dict, seed, dtype)
    model.config.get_text_config().dtype = getattr(torch, dtype)
    model.save_pretrained(path)
    if config_dict.get("text_config", config_dict).get("mtp_num_hidden_layers"):
        file = path / "model.safetensors"
        save_file(load_file(file) | build_draft_head(config_dict, seed, dtype).tensors(), file, {"format": "pt"})
    return model


def build_draft_head(config_dict: dict[str, Any], seed: int = 0, dtype: str = "float32") -> DraftHeadReference:
    """The draft head of `write_hf_checkpoint`."""
    head = DraftHeadReference(config_dict.get("text_config", config_dict))
    randomize_parameters(head, seed + 1)
    return head.to(getattr(torch, dtype)).eval()


@torch.no_grad()
def randomize_parameters(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter of ``model``, in the order of their names, from one generator."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        parameter.copy_(_random_values(name, parameter, generator))


def _random_values(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(like.shape, generator=generator)
    if name.endswith("A_log"):
        return torch.log(0.05 + 4 * torch.rand(like.shape, generator=generator))
    if name.endswith("dt_bias"):
        return noise - 1
    if name.endswith("linear_attn.norm.weight"):
        return 1 + _NORM_GAIN_STD * noise
    if like.ndim == 1:
        return _NORM_GAIN_STD * noise
    if "embed_tokens" in name or "ngram_embedding" in name:
        return noise
    fan_in = like.shape[-1]
    gain = next((gain for part, gain in _WEIGHT_GAIN.items() if part in name), 1.0)
    return gain / math.sqrt(fan_in) * noise
