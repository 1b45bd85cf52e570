"""The text model over packed tokens with explicit states, written for `torch.export`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from qwen4exp_trt.frontend.attention import GatedDeltaNet, QsaAttention
from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.modules import (
    Batch,
    Embedding,
    HyperConnection,
    HyperConnectionMixer,
    Linear,
    SparseMoe,
    States,
)
from qwen4exp_trt.frontend.ple import Ple
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.runtime.specs import StateSpec


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """``theta^(-2i/R)`` for i below R/2, float32, rounded as the reference rounds them."""
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.int64).float() / config.rotary_dim
    return 1.0 / (config.rope_theta**exponents)


class DecoderLayer(nn.Module):
    """A token mixer and a mixture of experts, each between a read of and a write to the residual stack."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.attn_hyper_connection = HyperConnection(config)
        self.mlp_hyper_connection = HyperConnection(config)
        self.is_linear = config.is_linear(layer)
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(config, layer)
        else:
            self.self_attn = QsaAttention(config, layer)
        self.ple = Ple(config, layer) if layer in config.ple_layers else None
        self.mlp = SparseMoe(config)

    def forward(
        self, stack: Tensor, inv_freq: Tensor, no_selection: Tensor, batch: Batch, states: States
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The stack before the last combine, with that combine's operands (see `Combine`)."""
        if self.ple is not None:
            stack = self.ple(stack, batch, states)
        mixed, inject = self.attn_hyper_connection(stack)
        if self.is_linear:
            y = self.linear_attn(mixed, batch, states)
        else:
            y = self.self_attn(mixed, inv_freq, no_selection, batch, states)
        stack = self.attn_hyper_connection.combine(stack, y, inject)
        mixed, inject = self.mlp_hyper_connection(stack)
        return stack, self.mlp(mixed, batch), inject


class TextModel(nn.Module):
    """Token ids in, float logits of the rows in ``logits_indices`` out; with a draft head, the stack of every row too.

    Parameters carry the checkpoint's names without prefix. Buffers are constants of the config.
    """

    def __init__(self, config: ModelConfig, states: Sequence[StateSpec]) -> None:
        super().__init__()
        all_specs()
        self.hc_count, self.state_keys = config.hc_count, [(spec.layer, spec.kind) for spec in states]
        self.has_draft_head = config.has_draft_head
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.hyper_connection_mixer = HyperConnectionMixer(config)
        self.lm_head = Linear(config.vocab_size, config.hidden_size)
        self.register_buffer("inv_freq", rotary_frequencies(config))
        self.register_buffer("no_selection", torch.full((1, 1), -1, dtype=torch.int32))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        query_start_loc: Tensor,
        seq_lens: Tensor,
        slot_ids: Tensor,
        block_table: Tensor,
        num_seqs: Tensor,
        logits_indices: Tensor,
        states: Sequence[Tensor],
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Logits ``[L, V]``; for a draft head also the stacks ``[T, HC*H]`` behind the last layer."""
        batch = Batch(input_ids, positions, query_start_loc, seq_lens, slot_ids, block_table, num_seqs, logits_indices)
        by_key = dict(zip(self.state_keys, states, strict=True))
        shared = (self.inv_freq, self.no_selection, batch, by_key)
        first, *others = cast("list[DecoderLayer]", list(self.layers))
        stack = torch.cat([self.embed_tokens(input_ids)] * self.hc_count, -1)
        stack, y, inject = first(stack, *shared)
        combine = first.mlp_hyper_connection.combine
        for layer in others:
            stack, y, inject = layer(combine(stack, y, inject), *shared)
            combine = layer.mlp_hyper_connection.combine
        if self.has_draft_head:
            stack = combine(stack, y, inject)
            # The norm reads what the combine has just made: both are one kernel, and the stack is written anyway.
            return self.lm_head(self.hyper_connection_mixer(stack, logits_indices)), stack
        # Only the rows whose logits are asked for are combined and mixed.
        stack, y, inject = (rows.index_select(0, logits_indices) for rows in (stack, y, inject))
        return self.lm_head(self.hyper_connection_mixer(combine(stack, y, inject)))
