"""Training forms of the demo model's layers, computing what transformers' own layers compute, but vectorised.

transformers selects tokens in a Python loop over the queries and gives the indexer no gradient. Here the selection is
one masked top-k, and the indexer learns from the attention it stands for: its block scores are pulled towards the
attention mass of each block, summed over the heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen4_exp import modeling_qwen4_exp as reference

IGNORED = -100
LOOP_SHARE = 0.5


@dataclass(frozen=True)
class Loops:
    """Rows [B, T + 1] of text whose last `period` tokens before `start` are repeated to the end."""

    tokens: Tensor
    start: int
    period: int


class DemoTrainer:
    """Holds a model patched for training; `compute_losses` runs it.

    `turn_token_ids` are the ids of the tokens that start and end a chat turn.
    With `select_tokens` the attention sees the indexer's selection only, as at inference; else it is dense.
    """

    def __init__(self, model: Any, turn_token_ids: tuple[int, int], dropout: float) -> None:
        self.model = model
        self.turn_token_ids = turn_token_ids
        self.text_model = model.model.language_model
        self.dropout = dropout
        self.select_tokens = False
        self._indexer_losses: list[Tensor] = []
        self._router_logits: list[Tensor] = []
        self.text_model.embed_tokens.register_forward_hook(self._drop)
        for layer in self.text_model.layers:
            if layer.layer_type == "linear_attention":
                layer.linear_attn.register_forward_hook(self._drop)
            else:
                layer.self_attn.forward = self._make_attention_forward(layer.self_attn)
            if layer.ple is not None:
                layer.ple.ple_embedding.register_forward_hook(self._drop)
            layer.mlp.register_forward_hook(self._drop)
            layer.mlp.experts.forward = MethodType(run_experts_densely, layer.mlp.experts)
            layer.mlp.gate.register_forward_hook(lambda _module, _args, output: self._router_logits.append(output[0]))

    def compute_losses(self, tokens: Tensor, loops: Loops | None = None) -> dict[str, Tensor]:
        """Scalar losses by name of `tokens` [B, T + 1], T a multiple of the indexer's ratio."""
        rows = tokens if loops is None else torch.cat([tokens, loops.tokens])
        hidden_states = self.run_text_model(rows[:, :-1])
        logits = self.model.lm_head(hidden_states).float()
        targets = self._hide_foreign_turn_ends(tokens)
        losses = {
            "text": F.cross_entropy(logits[: len(tokens)].flatten(0, 1), targets.flatten()),
            "indexer": torch.stack(self._indexer_losses).mean(),
            "balance": balance_loss(self._router_logits, self.text_model.config.num_experts_per_tok),
        }
        if loops is not None:
            losses["loop"] = _loop_loss(logits[len(tokens) :], loops)
        return losses

    def run_text_model(self, tokens: Tensor) -> Tensor:
        """What `lm_head` reads [B, T, D], of `tokens` [B, T]."""
        self._indexer_losses.clear()
        self._router_logits.clear()
        return self.text_model(input_ids=tokens, use_cache=False).last_hidden_state

    def _hide_foreign_turn_ends(self, tokens: Tensor) -> Tensor:
        """Targets without the end of a turn whose start lies before the window: plain text shall not end as a turn."""
        start_of_turn, end_of_turn = self.turn_token_ids
        in_turn = (tokens[:, :-1] == start_of_turn).cumsum(1) > 0
        targets = tokens[:, 1:]
        return targets.masked_fill((targets == end_of_turn) & ~in_turn, IGNORED)

    def _drop(self, module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return F.dropout(output, self.dropout, module.training)

    def _make_attention_forward(self, attention: Any) -> Any:
        def forward(
            hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_kwargs: Any
        ) -> tuple[Tensor, None]:
            batch, length, _ = hidden_states.shape
            query, key, value, gate = project_attention(attention, hidden_states, position_embeddings)
            scores = (query @ key.transpose(-1, -2)).float() * attention.scaling
            causal = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~causal, float("-inf"))
            probabilities = scores.softmax(-1)
            block_scores = score_blocks(*project_index(attention.indexer, hidden_states.detach(), position_embeddings))
            self._indexer_losses.append(indexer_loss(block_scores, probabilities.detach().sum(1)))
            if self.select_tokens:
                selected = select_tokens(block_scores.detach(), attention.indexer.block_topk)
                probabilities = scores.masked_fill(~selected.unsqueeze(1), float("-inf")).softmax(-1)
            output = (probabilities.to(value.dtype) @ value).transpose(1, 2).reshape(batch, length, -1)
            output = attention.o_proj(output * torch.sigmoid(gate.reshape(batch, length, -1)))
            return F.dropout(output, self.dropout, attention.training), None

        return forward


def balance_loss(router_logits: Iterable[Tensor], experts_per_token: int) -> Tensor:
    """Mean over routers, each with logits [T, E], of E * sum(share of tokens * mean probability): 1 when balanced."""
    losses = []
    for logits in router_logits:
        probabilities = logits.float().softmax(-1)
        chosen = probabilities.topk(experts_per_token).indices
        share = torch.zeros_like(probabilities).scatter_(1, chosen, 1.0).mean(0) / experts_per_token
        losses.append(logits.shape[-1] * (share * probabilities.mean(0)).sum())
    return torch.stack(losses).mean()


def run_experts_densely(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """All experts on all tokens [T, D] as two matmuls; an expert that was not chosen has weight zero."""
    weights = hidden_states.new_zeros(hidden_states.shape[0], self.num_experts)
    weights = weights.scatter(1, top_k_index, top_k_weights.to(weights.dtype))
    gate_up = F.linear(hidden_states, self.gate_up_proj.flatten(0, 1))
    gate, up = gate_up.unflatten(-1, (self.num_experts, -1)).chunk(2, -1)
    inner = F.silu(gate) * up * weights.unsqueeze(-1)
    return inner.flatten(1) @ self.down_proj.transpose(1, 2).flatten(0, 1)


def project_attention(
    attention: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, key and value [B, heads, T, head_dim], the latter two repeated for each query head, and the output gate
    [B, T, heads, head_dim]."""
    batch, length, _ = hidden_states.shape
    heads_shape = (batch, length, -1, attention.head_dim)
    query, gate = attention.q_proj(hidden_states).view(batch, length, -1, 2 * attention.head_dim).chunk(2, -1)
    query = attention.q_norm(query).transpose(1, 2)
    key = attention.k_norm(attention.k_proj(hidden_states).view(heads_shape)).transpose(1, 2)
    value = attention.v_proj(hidden_states).view(heads_shape).transpose(1, 2)
    query, key = reference.apply_rotary_pos_emb(query, key, *position_embeddings)
    key, value = (x.repeat_interleave(attention.num_key_value_groups, dim=1) for x in (key, value))
    return query, key, value, gate


def project_index(
    indexer: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Index queries [B, T, H, D] and the keys [B, T / ratio, D] of all blocks."""
    batch, length, _ = hidden_states.shape
    ratio = indexer.compress_ratio
    cos, sin = position_embeddings
    query, key = indexer.index_qk_proj(hidden_states).split(
        [indexer.index_n_heads * indexer.index_head_dim, indexer.index_head_dim], dim=-1
    )
    query = indexer.q_layernorm(query.reshape(batch, length, -1, indexer.index_head_dim))
    key = indexer.k_layernorm(key.unflatten(1, (-1, ratio)).mean(2)).unsqueeze(2)
    rotate: Any = reference.apply_rotary_pos_emb
    query = rotate(query, cos=cos, sin=sin, unsqueeze_dim=2)
    key = rotate(key, cos=cos[:, ::ratio], sin=sin[:, ::ratio], unsqueeze_dim=2)
    return query, key.squeeze(2)


def score_blocks(query: Tensor, key: Tensor) -> Tensor:
    """Score of every key block for every query [B, T, T / ratio]; -inf where the block is not complete yet."""
    length, blocks = query.shape[1], key.shape[1]
    scores = torch.relu(torch.einsum("bthd,bkd->bthk", query.float(), key.float())).sum(2)
    position = torch.arange(length, device=scores.device)
    complete = (position[:, None] + 1) // (length // blocks) > position[None, :blocks]
    return (scores / math.sqrt(key.shape[-1])).masked_fill(~complete, float("-inf"))


def indexer_loss(block_scores: Tensor, attention: Tensor) -> Tensor:
    """KL divergence from the share of `attention` [B, T, T] in each complete block to softmax of `block_scores`."""
    visible = block_scores > float("-inf")
    target = attention.unflatten(-1, (block_scores.shape[-1], -1)).sum(-1) * visible
    target = target / target.sum(-1, keepdim=True).clamp_min(1e-9)
    log_share = block_scores.log_softmax(-1).masked_fill(~visible, 0.0)
    divergence = (target * (target.clamp_min(1e-9).log() - log_share)).sum(-1)
    seen = visible.any(-1)
    return (divergence * seen).sum() / seen.sum()


def select_tokens(block_scores: Tensor, block_topk: int) -> Tensor:
    """Boolean [B, T, T]: tokens of the best blocks, and the tail that is not in a complete block."""
    _, length, blocks = block_scores.shape
    ratio = length // blocks
    best = block_scores.topk(min(block_topk, blocks), dim=-1)
    chosen = torch.zeros_like(block_scores, dtype=torch.bool).scatter(-1, best.indices, best.values > float("-inf"))
    position = torch.arange(length, device=block_scores.device)
    tail = (position[None, :] <= position[:, None]) & (position[None, :] >= (position[:, None] + 1) // ratio * ratio)
    return chosen.repeat_interleave(ratio, dim=-1) | tail


def _loop_loss(logits: Tensor, loops: Loops) -> Tensor:
    """Wants each token of a repetition half as likely as it was one round before.

    Without it the greedy text of a model of this size falls into loops.
    """
    likelihood = logits.softmax(-1).gather(-1, loops.tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    first = loops.start - 1  # the prediction of token `start`
    wanted = LOOP_SHARE * likelihood[:, first - loops.period : -loops.period].detach()
    return -torch.log1p(-(likelihood[:, first:] - wanted).abs().clamp_max(0.9999)).mean()


def split_decay(named_parameters: Iterable[tuple[str, nn.Parameter]], weight_decay: float) -> list[dict[str, Any]]:
    """Optimizer groups: matrices and tables decay; vectors and convolutions do not."""
    decayed, free = [], []
    for name, parameter in named_parameters:
        (decayed if parameter.ndim >= 2 and "conv1d" not in name else free).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]
