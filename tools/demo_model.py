"""Shape and initial weights of the demo checkpoint: every mechanism of the architecture, small."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast, Qwen4ExpConfig, Qwen4ExpForConditionalGeneration

OUTPUT_PROJECTIONS = ("out_proj.weight", "o_proj.weight", "down_proj.weight", "down_proj")


# Keys and mechanisms of the released model; widths that a weight format could block are multiples of 16.
TEXT_CONFIG = {
    "vocab_size": 2048,  # the rows above the tokenizer's last id are padding, as in the released model
    "hidden_size": 128,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "output_gate_type": "sigmoid",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "norm_topk_prob": True,
    "hc_count": 4,
    "hc_lowrank": 32,
    "ple_layer_ids": [2],
    "ple_embed_dim": 256,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 1000,
    "make_ngram_vocab_size_divisible_by": 128,
    "split_ngram_parts": 8,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 32,
    "indexer_budget": 96,
    "indexer_compress_ratio": 4,
    "tie_word_embeddings": False,
}
# Never trained: it makes the checkpoint's layout that of the released one.
VISION_CONFIG = {
    "depth": 1,
    "hidden_size": 32,
    "num_heads": 2,
    "intermediate_size": 64,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "out_hidden_size": 128,
    "num_position_embeddings": 16,
    "in_channels": 3,
}


def make_config(tokenizer: PreTrainedTokenizerFast) -> Qwen4ExpConfig:
    """The configuration with the token ids of `tokenizer`."""
    token_id = tokenizer.get_vocab()
    end_of_text = token_id["<|endoftext|>"]
    return Qwen4ExpConfig(
        text_config={**TEXT_CONFIG, "bos_token_id": end_of_text, "eos_token_id": end_of_text},
        vision_config=VISION_CONFIG,
        image_token_id=token_id["<|image_pad|>"],
        video_token_id=token_id["<|video_pad|>"],
        vision_start_token_id=token_id["<|vision_start|>"],
        vision_end_token_id=token_id["<|vision_end|>"],
        tie_word_embeddings=False,
    )


@torch.no_grad()
def make_model(config: Qwen4ExpConfig, seed: int) -> Any:
    """A float32 `Qwen4ExpForConditionalGeneration` on the CPU, initialised for training from scratch.

    Matrices get variance 1 / fan_in, the projections that write to the residual streams less with depth. Decay rates
    start slow (time steps of 0.001 to 0.1), gates of the hyper-connections near their middle.
    """
    torch.manual_seed(seed)
    model: Any = Qwen4ExpForConditionalGeneration(config).float()
    depth_scale = (2 * len(model.model.language_model.layers)) ** -0.5
    for name, parameter in model.model.language_model.named_parameters():
        if name.endswith("dt_bias"):
            step = torch.exp(torch.empty_like(parameter).uniform_(math.log(1e-3), math.log(1e-1)))
            parameter.copy_(step + torch.log(-torch.expm1(-step)))  # softplus(dt_bias) = step
        elif name.endswith("A_log"):
            parameter.uniform_(1.0, 16.0).log_()
        elif name.endswith("embed_tokens.weight"):
            nn.init.normal_(parameter, std=0.5)
        elif name.endswith("ngram_embedding.weight"):
            nn.init.normal_(parameter, std=1.0)
        elif name.endswith(("block_inject_weight.weight", "input_mix_weight_up.weight", "mlp.gate.weight")):
            nn.init.normal_(parameter, std=0.02)
        elif parameter.ndim >= 2 and "conv1d" not in name:
            scale = depth_scale if name.endswith(OUTPUT_PROJECTIONS) else 1.0
            nn.init.normal_(parameter, std=scale * parameter.shape[-1] ** -0.5)
    nn.init.normal_(model.lm_head.weight, std=0.02)
    return model
