"""The draft head wired from the modules of transformers, which itself drops the tensors ``mtp.*``.

Pair i is the token x[i+1] with the stack R[i] behind the model's last layer, at position i; it predicts x[i+2].
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class DraftHeadReference(nn.Module):
    """Parameters carry the checkpoint's names below ``mtp.``."""

    def __init__(self, text_config: dict[str, Any]) -> None:
        from transformers.models.qwen4_exp import configuration_qwen4_exp
        from transformers.models.qwen4_exp import modeling_qwen4_exp as modeling

        super().__init__()
        one_layer = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "ple_layer_ids": []}
        config_dict = copy.deepcopy(text_config) | one_layer
        config = configuration_qwen4_exp.Qwen4ExpTextConfig.from_dict(config_dict)
        config._attn_implementation = "eager"
        hidden, eps, self.hc_count = config.hidden_size, config.rms_norm_eps, config.hc_count
        self.pre_fc_norm_embedding = modeling.Qwen4ExpTextRMSNorm(hidden, eps=eps)
        self.pre_fc_norm_hidden = modeling.Qwen4ExpTextRMSNorm(self.hc_count * hidden, eps=eps)
        self.fc_embedding = nn.Linear(hidden, hidden, bias=False)
        self.fc_hidden = nn.Linear(hidden, hidden, bias=False)
        self.layers = nn.ModuleList([modeling.Qwen4ExpTextDecoderLayer(config, 0)])
        self.hyper_connection_mixer = modeling.Qwen4ExpTextGatedResidual(config, use_combine=False)
        self.rotary = [modeling.Qwen4ExpTextRotaryEmbedding(config=config)]  # in a list: no part of the checkpoint

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint has of it."""
        return {f"mtp.{name}": tensor.clone().contiguous() for name, tensor in self.state_dict().items()}

    @torch.no_grad()
    def forward(self, embedded: Tensor, stack: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """What the head reads ``[T, H]`` and its own stack ``[T, HC*H]`` for the pairs 0 to T - 1 of one sequence.

        ``embedded`` ``[T, H]`` of the tokens x[1..T], ``stack`` ``[T, HC*H]``; ``positions`` ``[3, T]`` for MRoPE.
        """
        length = len(stack)
        streams = self.pre_fc_norm_hidden(stack).view(length, self.hc_count, -1)
        entered = self.fc_embedding(self.pre_fc_norm_embedding(embedded))
        own = (self.fc_hidden(streams) + entered[:, None]).flatten(1)[None]
        if positions is None:
            positions = torch.arange(length).repeat(3, 1)
        mask = torch.full((length, length), torch.finfo(own.dtype).min, dtype=own.dtype).triu(1)[None, None]
        own = self.layers[0](own, self.rotary[0](own, positions[:, None]), attention_mask=mask)
        return self.hyper_connection_mixer(own)[0], own[0]
