"""The two token mixers: Gated DeltaNet (linear attention) and full attention with an indexer (QSA)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.frontend.modules import Q4E, Batch, ConvWeight, Linear, States, Weight, ZeroCenteredGain
from qwen4exp_trt.runtime.specs import StateKind


class GatedDeltaNet(nn.Module):
    """Linear attention: short convolution, gated delta rule, gated norm."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.eps, self.output_gate = layer, config.rms_norm_eps, config.output_gate_type
        self.num_k_heads = config.linear_num_key_heads
        hidden, heads = config.hidden_size, config.linear_num_value_heads
        self.in_proj_qkv = Linear(config.linear_conv_dim, hidden)
        self.in_proj_z = Linear(config.linear_value_dim, hidden)
        self.in_proj_b = Linear(heads, hidden)
        self.in_proj_a = Linear(heads, hidden)
        self.conv1d = ConvWeight(config.linear_conv_dim, config.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.empty(heads), requires_grad=False)
        self.dt_bias = nn.Parameter(torch.empty(heads), requires_grad=False)
        self.norm = Weight(config.linear_value_head_dim)
        self.out_proj = Linear(hidden, config.linear_value_dim)

    def forward(self, x: Tensor, batch: Batch, states: States) -> Tensor:
        """``x`` ``[T, H]`` -> ``[T, H]``."""
        qkvz = torch.cat([self.in_proj_qkv(x), self.in_proj_z(x)], -1)
        ba = torch.cat([self.in_proj_b(x), self.in_proj_a(x)], -1)
        conv_state = states[self.layer, StateKind.CONV_STATE]
        conv_out = Q4E.causal_conv1d(qkvz, self.conv1d(), conv_state, *batch.slots)
        out = Q4E.gated_delta_rule(
            conv_out,
            qkvz,
            ba,
            self.A_log,
            self.dt_bias,
            self.norm.weight,
            states[self.layer, StateKind.RECURRENT_STATE],
            states[self.layer, StateKind.DRAFT_ROWS],
            states[self.layer, StateKind.COMMITTED_LEN],
            *batch.slots,
            self.num_k_heads,
            self.eps,
            self.output_gate,
        )
        return self.out_proj(out)


class Indexer(nn.Module):
    """Chooses for each query token the groups of earlier tokens that it attends to."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        assert config.indexer_n_heads and config.indexer_head_dim
        assert config.indexer_budget and config.indexer_compress_ratio
        self.layer, self.eps, self.mrope_section = layer, config.rms_norm_eps, list(config.mrope_section)
        self.budget, self.compress_ratio = config.indexer_budget, config.indexer_compress_ratio
        head_dim = config.indexer_head_dim
        self.index_qk_proj = Linear((config.indexer_n_heads + 1) * head_dim, config.hidden_size)
        self.q_layernorm = ZeroCenteredGain(head_dim)
        self.k_layernorm = ZeroCenteredGain(head_dim)

    def forward(self, x: Tensor, inv_freq: Tensor, batch: Batch, states: States) -> Tensor:
        """``x`` ``[T, H]`` -> selected groups int32 ``[T, budget / compress_ratio]``."""
        index_k_cache = states[self.layer, StateKind.INDEX_K_CACHE]
        index_q = Q4E.qsa_indexer(
            self.index_qk_proj(x),
            self.q_layernorm(),
            self.k_layernorm(),
            batch.positions,
            inv_freq,
            index_k_cache,
            states[self.layer, StateKind.INDEX_K_RING],
            states[self.layer, StateKind.INDEX_POSITION_RING],
            batch.query_start_loc,
            batch.seq_lens,
            batch.slot_ids,
            batch.block_table,
            batch.num_seqs,
            self.mrope_section,
            self.compress_ratio,
            self.eps,
        )
        return Q4E.qsa_select(index_q, index_k_cache, *batch.pages, self.budget, self.compress_ratio)


class QsaAttention(nn.Module):
    """Grouped-query attention with an output gate, over the indexer's selection or, without an indexer, over all."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.eps, self.mrope_section = layer, config.rms_norm_eps, list(config.mrope_section)
        self.num_heads, self.compress_ratio = config.num_attention_heads, config.indexer_compress_ratio or 0
        hidden, head_dim = config.hidden_size, config.head_dim
        self.q_proj = Linear(2 * config.num_attention_heads * head_dim, hidden)
        self.k_proj = Linear(config.num_key_value_heads * head_dim, hidden)
        self.v_proj = Linear(config.num_key_value_heads * head_dim, hidden)
        self.o_proj = Linear(hidden, config.num_attention_heads * head_dim)
        self.q_norm = ZeroCenteredGain(head_dim)
        self.k_norm = ZeroCenteredGain(head_dim)
        self.indexer = Indexer(config, layer) if config.has_indexer else None

    def forward(self, x: Tensor, inv_freq: Tensor, no_selection: Tensor, batch: Batch, states: States) -> Tensor:
        """``x`` ``[T, H]`` -> ``[T, H]``. ``no_selection`` stands for the selection where there is no indexer."""
        selected = no_selection if self.indexer is None else self.indexer(x, inv_freq, batch, states)
        out = Q4E.qsa_attention(
            torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1),
            self.q_norm(),
            self.k_norm(),
            batch.positions,
            inv_freq,
            selected,
            states[self.layer, StateKind.KV_CACHE],
            *batch.pages,
            self.num_heads,
            self.mrope_section,
            self.compress_ratio,
            self.eps,
        )
        return self.o_proj(out)
