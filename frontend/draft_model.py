"""The draft head (multi-token prediction) over packed tokens with explicit states, written for `torch.export`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.model import DecoderLayer, rotary_frequencies
from qwen4exp_trt.frontend.modules import (
    Q4E,
    Batch,
    Embedding,
    HyperConnectionMixer,
    Linear,
    States,
    ZeroCenteredGain,
)
from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.runtime.specs import StateSpec


class RmsNorm(ZeroCenteredGain):
    """A zero-centred RMSNorm over the whole row."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return Q4E.hc_norm(x, super().forward(), 1, self.eps)


class MtpHead(nn.Module):
    """What the checkpoint has under ``mtp``: the entry, one full-attention layer and the last read of its stack."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.hc_count, self.hidden_size, self.stack_width = config.hc_count, config.hidden_size, config.stack_width
        self.pre_fc_norm_embedding = RmsNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = RmsNorm(config.stack_width, config.rms_norm_eps)
        self.fc_embedding = Linear(config.hidden_size, config.hidden_size)
        self.fc_hidden = Linear(config.hidden_size, config.hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(config, config.draft_layer)])
        self.hyper_connection_mixer = HyperConnectionMixer(config)
        size = config.draft_vocab_size
        self.lm_head = None if size is None else Linear(size, config.hidden_size)

    def forward(self, embedded: Tensor, stack: Tensor) -> Tensor:
        """The head's own stack ``[T, HC*H]``, from next tokens' embeddings ``[T, H]`` and the model's stack.

        The model's stack has one RMS over all its streams; then one projection serves each stream.
        """
        entered = self.fc_embedding(self.pre_fc_norm_embedding(embedded))
        streams = self.fc_hidden(self.pre_fc_norm_hidden(stack).view(-1, self.hidden_size))
        streams = streams.view(-1, self.hc_count, self.hidden_size) + entered.unsqueeze(1)
        return streams.view(-1, self.stack_width)


class DraftModel(nn.Module):
    """Next tokens' ids and the model's stacks in; logits of the tokens behind those, and the head's own stacks, out.

    The row at position i has the id of token i + 1 and the stack behind the model's last layer at i; it predicts
    token i + 2. To draft another token, the stack that comes out goes in again, at the next position. Parameters carry
    the checkpoint's names without prefix; the embedding is the model's, and so is the ``lm_head`` unless the config has
    a ``draft_vocab_size``.
    """

    def __init__(self, config: ModelConfig, states: Sequence[StateSpec]) -> None:
        super().__init__()
        all_specs()
        self.state_keys = [(spec.layer, spec.kind) for spec in states]
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.mtp = MtpHead(config)
        self.lm_head = Linear(config.vocab_size, config.hidden_size) if self.mtp.lm_head is None else None
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
        stack: Tensor,
        states: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Logits ``[L, V]`` and stacks ``[L, HC*H]`` of the rows in ``logits_indices``."""
        batch = Batch(input_ids, positions, query_start_loc, seq_lens, slot_ids, block_table, num_seqs, logits_indices)
        by_key: States = dict(zip(self.state_keys, states, strict=True))
        layer = cast(DecoderLayer, self.mtp.layers[0])
        own = self.mtp(self.embed_tokens(input_ids), stack)
        own, y, inject = layer(own, self.inv_freq, self.no_selection, batch, by_key)
        own, y, inject = (rows.index_select(0, logits_indices) for rows in (own, y, inject))
        own = layer.mlp_hyper_connection.combine(own, y, inject)
        head = self.mtp.lm_head or self.lm_head
        assert head is not None
        return head(self.mtp.hyper_connection_mixer(own)), own
