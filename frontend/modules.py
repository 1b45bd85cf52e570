"""Building blocks of the model that own weights under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from qwen4exp_trt.frontend.config import ModelConfig
from qwen4exp_trt.runtime.specs import StateKind

Q4E: Any = torch.ops.q4e


@dataclass(frozen=True)
class Batch:
    """The metadata inputs of one step; see `frontend.export.input_specs` for their shapes."""

    input_ids: Tensor
    positions: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    slot_ids: Tensor
    block_table: Tensor
    num_seqs: Tensor
    logits_indices: Tensor

    @property
    def slots(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What an op with a per-sequence state needs."""
        return self.query_start_loc, self.seq_lens, self.slot_ids, self.num_seqs

    @property
    def pages(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What an op with a paged cache needs."""
        return self.query_start_loc, self.seq_lens, self.block_table, self.num_seqs


States = Mapping[tuple[int, StateKind], Tensor]
"""The state tensors by layer and kind."""


class Linear(nn.Module):
    """A projection without bias; ``weight`` ``[out_features, in_features]``."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight)


class Weight(nn.Module):
    """A bare weight of a module that computes elsewhere."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)


class ZeroCenteredGain(Weight):
    """The weight of a zero-centred RMSNorm; calling it gives the gain ``1 + weight`` in float32."""

    def forward(self) -> Tensor:
        return self.weight.float() + 1.0


class HyperConnection(nn.Module):
    """A gated read of the residual stack ``[T, HC*H]`` and the weights with which the block's output returns."""

    def __init__(self, config: ModelConfig, injects: bool) -> None:
        super().__init__()
        self.hc_count, self.eps = config.hc_count, config.rms_norm_eps
        self.hc_norm = ZeroCenteredGain(config.stack_width)
        self.input_mix_weight_down = Linear(config.hc_lowrank, config.stack_width)
        self.input_mix_weight_up = Linear(config.stack_width, config.hc_lowrank)
        if injects:
            self.block_inject_weight = Linear(config.hc_count, config.stack_width)

    def forward(self, stack: Tensor) -> tuple[Tensor, Tensor]:
        """The normed stack ``[T, HC*H]`` and the block's input ``[T, H]``."""
        normed = Q4E.hc_norm(stack, self.hc_norm(), self.hc_count, self.eps)
        lowrank = silu(self.input_mix_weight_down(normed) / self.hc_count)
        return normed, Q4E.hc_mix(self.input_mix_weight_up(lowrank), normed, self.hc_count)

    def inject(self, normed: Tensor) -> Tensor:
        """Per-stream weights ``[T, HC]`` of the block's output."""
        return torch.sigmoid(self.block_inject_weight(normed) / self.hc_count) * 2


def combine(stack: Tensor, y: Tensor, inject: Tensor) -> Tensor:
    """Add the block output ``y`` ``[T, H]`` to every stream of ``stack`` ``[T, HC*H]`` with its weight ``[T, HC]``."""
    return stack + (inject.unsqueeze(2) * y.unsqueeze(1)).view(-1, stack.shape[1])


class Experts(nn.Module):
    """The routed experts' weights; gate rows come before up rows."""

    def __init__(self, num_experts: int, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * inner, hidden), requires_grad=False)
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden, inner), requires_grad=False)


class SharedExpert(nn.Module):
    """The weights of the expert that every token uses."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = Weight(inner, hidden), Weight(inner, hidden)
        self.down_proj = Weight(hidden, inner)

    def gate_up(self) -> Tensor:
        return torch.cat([self.gate_proj.weight, self.up_proj.weight])


class SparseMoe(nn.Module):
    """Routed experts plus a gated shared expert."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        hidden, inner, shared = (
            config.hidden_size,
            config.moe_intermediate_size,
            config.shared_expert_intermediate_size,
        )
        self.top_k, self.norm_topk_prob = config.num_experts_per_tok, int(config.norm_topk_prob)
        self.gate = Weight(config.num_experts, hidden)
        self.experts = Experts(config.num_experts, hidden, inner)
        self.shared_expert = SharedExpert(hidden, shared)
        self.shared_expert_gate = Weight(1, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return Q4E.moe(
            x,
            self.gate.weight,
            self.experts.gate_up_proj,
            self.experts.down_proj,
            self.shared_expert.gate_up(),
            self.shared_expert.down_proj.weight,
            self.shared_expert_gate.weight,
            self.top_k,
            self.norm_topk_prob,
        )
