"""Building blocks of the model that own weights under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, silu

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


class Embedding(nn.Module):
    """Rows of ``weight`` ``[vocab_size, H]``."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight)


class Weight(nn.Module):
    """A bare weight of a module that computes elsewhere."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape), requires_grad=False)


class ConvWeight(Weight):
    """The taps ``[C, 1, K]`` of a depthwise convolution; calling it gives them as ``[C, K]``."""

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__(channels, 1, kernel_size)

    def forward(self) -> Tensor:
        return self.weight.view(self.weight.shape[0], self.weight.shape[2])


class ZeroCenteredGain(Weight):
    """The weight of a zero-centred RMSNorm; calling it gives the gain ``1 + weight`` in float32."""

    def forward(self) -> Tensor:
        return self.weight.float() + 1.0


class HyperConnectionMixer(nn.Module):
    """A gated read of the residual stack ``[T, HC*H]``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.hc_count, self.eps = config.hc_count, config.rms_norm_eps
        self.hc_norm = ZeroCenteredGain(config.stack_width)
        self.input_mix_weight_down = Linear(config.hc_lowrank, config.stack_width)
        self.input_mix_weight_up = Linear(config.stack_width, config.hc_lowrank)

    def forward(self, stack: Tensor, rows: Tensor | None = None) -> Tensor:
        """What the model reads of the stack ``[T, H]``, or of those of its ``rows`` alone."""
        normed = self.norm(stack)
        return self.mix(normed if rows is None else normed.index_select(0, rows))

    def norm(self, stack: Tensor) -> Tensor:
        return Q4E.hc_norm(stack, self.hc_norm(), self.hc_count, self.eps)

    def mix(self, normed: Tensor) -> Tensor:
        lowrank = silu(self.input_mix_weight_down(normed) / self.hc_count)
        return Q4E.hc_mix(self.input_mix_weight_up(lowrank), normed, self.hc_count)


class HyperConnection(HyperConnectionMixer):
    """The read of the stack for one block, and the weights with which the block's output returns to each stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.block_inject_weight = Linear(config.hc_count, config.stack_width)
        self.combine = Combine()

    def forward(self, stack: Tensor) -> tuple[Tensor, Tensor]:
        """The block's input ``[T, H]`` and the inject weights ``[T, HC]`` for `Combine`."""
        normed = self.norm(stack)
        mixed = self.mix(normed)
        return mixed, torch.sigmoid(self.block_inject_weight(normed) / self.hc_count) * 2


class Combine(nn.Module):
    """Adds the block output ``y`` ``[T, H]`` to every stream of ``stack`` ``[T, HC*H]`` with its weight ``[T, HC]``."""

    def forward(self, stack: Tensor, y: Tensor, inject: Tensor) -> Tensor:
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

    def forward(self) -> Tensor:
        """Gate rows, then up rows ``[2*IS, H]``."""
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

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return Q4E.moe(
            x,
            self.gate.weight,
            self.experts.gate_up_proj,
            self.experts.down_proj,
            self.shared_expert(),
            self.shared_expert.down_proj.weight,
            self.shared_expert_gate.weight,
            batch.query_start_loc,
            batch.num_seqs,
            self.top_k,
            self.norm_topk_prob,
        )
