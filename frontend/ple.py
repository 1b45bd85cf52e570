"""Per-layer embedding: hashed n-grams of the raw token ids, gated into the residual stack."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.modules import Q4E, Batch, ConvWeight, Linear, States, Weight, ZeroCenteredGain
from qwen4exp_trt.frontend.ngram import ngram_hash
from qwen4exp_trt.runtime.specs import StateKind


class PleEmbedding(nn.Module):
    """The hash constants and the table of one PLE layer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.eos_token_id = layer, config.ngram_eos_token_id
        constants = ngram_hash(config, layer)
        self.register_buffer("layer_multipliers", torch.tensor(constants.multipliers))
        self.register_buffer("ngram_heads_vocab_sizes", torch.tensor(constants.vocab_sizes))
        self.register_buffer("ngram_heads_offsets", torch.tensor(constants.offsets))
        self.ngram_embedding = Weight(constants.num_rows, config.ngram_head_dim)

    def forward(self, batch: Batch, states: States) -> Tensor:
        """The concatenated rows ``[T, ple_embed_dim]`` of each token's n-grams."""
        rows = Q4E.ple_hash(
            batch.input_ids,
            states[self.layer, StateKind.NGRAM_IDS],
            self.layer_multipliers,
            self.ngram_heads_vocab_sizes,
            self.ngram_heads_offsets,
            *batch.slots,
            self.eos_token_id,
        )
        return Q4E.ple_gather(rows, self.ngram_embedding.weight)


class Ple(nn.Module):
    """Adds the n-gram embedding of each token to the stack ``[T, HC*H]``."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.eps, self.dilation = layer, config.rms_norm_eps, config.ngram_size
        self.ple_embedding = PleEmbedding(config, layer)
        self.key_proj = Linear(config.stack_width, config.ple_embed_dim)
        self.value_proj = Linear(config.hidden_size, config.ple_embed_dim)
        self.norm_key = ZeroCenteredGain(config.stack_width)
        self.norm_query = ZeroCenteredGain(config.stack_width)
        self.norm_conv = ZeroCenteredGain(config.stack_width)
        self.conv1d = ConvWeight(config.stack_width, config.ple_conv_kernel_size)

    def forward(self, stack: Tensor, batch: Batch, states: States) -> Tensor:
        embedding = self.ple_embedding(batch, states)
        return Q4E.ple_conv(
            stack,
            self.key_proj(embedding),
            self.value_proj(embedding),
            self.norm_key(),
            self.norm_query(),
            self.norm_conv(),
            self.conv1d(),
            states[self.layer, StateKind.PLE_CONV_STATE],
            *batch.slots,
            self.dilation,
            self.eps,
        )
