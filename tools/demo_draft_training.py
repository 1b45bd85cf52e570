"""Trains the draft head on what the frozen demo model predicts, over several drafts in a row.

Chain r begins at position r. Its first draft reads the target's stack at r; each further one reads the head's own stack
of the draft before, as the runtime does. Row r of step s therefore attends to the true rows up to r, which are those of
step 1, and to the s - 1 rows of its own chain.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from demo_draft_head import DraftHead
from demo_training import (
    DemoTrainer,
    balance_loss,
    indexer_loss,
    project_attention,
    project_index,
    run_experts_densely,
    score_blocks,
    select_tokens,
)
from torch import Tensor
from torch.nn import functional as F

STEP_WEIGHTS = (1.0, 0.6, 0.4)
"""Of the losses of the drafts of a chain: a later draft counts only when those before it are accepted."""


@dataclass(frozen=True)
class Target:
    """What the frozen model makes of tokens [B, T]: its final residual stack [B, T, S * D] and its logits [B, T, V]."""

    stack: Tensor
    logits: Tensor


class FrozenTarget:
    """The demo model, run with vectorised layers; see `demo_training`."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval().requires_grad_(False)
        trainer = DemoTrainer(model, turn_token_ids=(-1, -1), dropout=0.0)
        trainer.select_tokens = True
        self._trainer = trainer
        self._stacks: list[Tensor] = []
        self.text_model = trainer.text_model
        self.text_model.hyper_connection_mixer.register_forward_pre_hook(self._keep_stack)

    @property
    def ratio(self) -> int:
        return self.text_model.config.indexer_compress_ratio

    @torch.no_grad()
    def run(self, tokens: Tensor) -> Target:
        """`tokens` [B, T], T a multiple of the indexer's ratio."""
        hidden_states = self._trainer.run_text_model(tokens)
        return Target(self._stacks[0], self.model.lm_head(hidden_states).float())

    @torch.no_grad()
    def from_stack(self, stack: Tensor) -> Target:
        """What `run` gives, of a stack that it gave."""
        hidden_states = self.text_model.hyper_connection_mixer(stack)
        return Target(stack, self.model.lm_head(hidden_states).float())

    def _keep_stack(self, _mixer: Any, args: tuple[Tensor]) -> None:
        self._stacks[:] = args

    def embed(self, tokens: Tensor) -> Tensor:
        return self.text_model.embed_tokens(tokens)


class ChainedDrafts:
    """Runs the head along all chains of some text at once."""

    def __init__(self, head: DraftHead, target: FrozenTarget) -> None:
        self.head = head
        self.target = target
        self.indexer_losses: list[Tensor] = []
        self.router_logits: list[Tensor] = []
        self._attention: Any = head.layers[0].self_attn
        self._rows: list[tuple[Tensor, Tensor]] = []
        """Keys and values [B, heads, T, D] of each step so far."""
        self._index_keys: Tensor | None = None
        self._attention.forward = self._attend
        mlp: Any = head.layers[0].mlp
        mlp.experts.forward = MethodType(run_experts_densely, mlp.experts)
        mlp.gate.register_forward_hook(lambda _module, _args, output: self.router_logits.append(output[0]))

    def run(self, tokens: Tensor, stack: Tensor, steps: int) -> list[Tensor]:
        """Logits [B, T, V] of each step, for chains 0 to T - 1; row r of step s (from 1) guesses token r + s + 1.

        `tokens` [B, T + steps] and the target's `stack` [B, T, S * D]; T is a multiple of the indexer's ratio.
        """
        for cleared in (self._rows, self.indexer_losses, self.router_logits):
            cleared.clear()
        length, logits = stack.shape[1], []
        position = torch.arange(length, device=tokens.device)
        for step in range(1, steps + 1):
            embeddings = self.target.embed(tokens[:, step : step + length])
            hidden_states, stack = self.head(stack, embeddings, position + step - 1)
            logits.append(self.target.model.lm_head(hidden_states).float())
        return logits

    def _attend(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_kwargs: Any
    ) -> tuple[Tensor, None]:
        attention = self._attention
        batch, length, _ = hidden_states.shape
        query, key, value, gate = project_attention(attention, hidden_states, position_embeddings)
        self._rows.append((key, value))
        (true_key, true_value), *drafted = self._rows
        scores = (query @ true_key.transpose(-1, -2)).float() * attention.scaling
        causal = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~causal, float("-inf"))
        own = [(query * key).sum(-1, keepdim=True).float() * attention.scaling for key, _ in drafted]
        selected = self._select(hidden_states.detach(), position_embeddings, scores.detach())
        scores = scores.masked_fill(~selected.unsqueeze(1), float("-inf"))
        shares = torch.cat([scores, *own], -1).softmax(-1)
        output = shares[..., :length] @ true_value
        for column, (_, value) in enumerate(drafted, start=length):
            output = output + shares[..., column : column + 1] * value
        output = output.transpose(1, 2).reshape(batch, length, -1)
        return attention.o_proj(output * torch.sigmoid(gate.reshape(batch, length, -1))), None

    def _select(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], scores: Tensor) -> Tensor:
        """Boolean [B, T, T]: the true rows that each chain attends to. Blocks with drafted rows are not scored."""
        indexer = self._attention.indexer
        query, index_keys = project_index(indexer, hidden_states, position_embeddings)
        if len(self._rows) == 1:
            self._index_keys = index_keys
        assert self._index_keys is not None
        block_scores = score_blocks(query, self._index_keys)
        self.indexer_losses.append(indexer_loss(block_scores, scores.softmax(-1).sum(1)))
        return select_tokens(block_scores.detach(), indexer.block_topk)


def draft_losses(drafts: ChainedDrafts, tokens: Tensor, target: Target) -> dict[str, Tensor]:
    """Scalar losses by name of `tokens` [B, T + ratio], T a multiple of that ratio, of which `target` was made.

    A draft is pulled towards the whole distribution of the target at its place (KL divergence).
    """
    steps = len(STEP_WEIGHTS)
    length = tokens.shape[1] - drafts.target.ratio
    divergences = []
    for step, logits in enumerate(drafts.run(tokens, target.stack[:, :length], steps), start=1):
        wanted = target.logits[:, step : step + length].log_softmax(-1)
        divergence = F.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction="none").sum(-1)
        divergences.append(divergence.mean())
    experts_per_token = drafts.target.text_model.config.num_experts_per_tok
    return {f"draft {step}": divergence for step, divergence in enumerate(divergences, start=1)} | {
        "indexer": torch.stack(drafts.indexer_losses).mean(),
        "balance": balance_loss(drafts.router_logits, experts_per_token),
    }
