"""The draft head of the demo checkpoint: the released model's MTP layer, of transformers' own modules.

transformers leaves `mtp.*` tensors out. Its decoder layer, norms and mixer are the parts; how they are joined is here.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.qwen4_exp import modeling_qwen4_exp as reference

PREFIX = "mtp."


class DraftHead(nn.Module):
    """Guesses token x[i+2] from the target's residual stack at position i and token x[i+1].

    Its parameters have the names and shapes of the released checkpoint's 31 `mtp.*` tensors, without that prefix.
    Embedding and head of the vocabulary are the target's.
    """

    def __init__(self, config: Any) -> None:
        """`config`: the text config of the target."""
        super().__init__()
        config = copy.deepcopy(config)
        config.num_hidden_layers, config.layer_types, config.ple_layer_ids = 1, ["indexed_attention"], []
        hidden_size, self.hc_count = config.hidden_size, config.hc_count
        self.fc_embedding = nn.Linear(hidden_size, hidden_size, bias=False)
        self.fc_hidden = nn.Linear(hidden_size, hidden_size, bias=False)
        self.pre_fc_norm_embedding = reference.Qwen4ExpTextRMSNorm(hidden_size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = reference.Qwen4ExpTextRMSNorm(self.hc_count * hidden_size, eps=config.rms_norm_eps)
        self.layers: Any = nn.ModuleList([reference.Qwen4ExpTextDecoderLayer(config, 0)])
        self.hyper_connection_mixer = reference.Qwen4ExpTextGatedResidual(config, use_combine=False)
        self.rotary_emb = reference.Qwen4ExpTextRotaryEmbedding(config)

    def forward(
        self, stack: Tensor, embeddings: Tensor, positions: Tensor, attention_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The input of the vocabulary's head [B, T, D], and the residual stack [B, T, S * D] for the next draft.

        Row i has the stack [B, T, S * D] at position `positions[i]` and the embedding [B, T, D] of the token behind it.
        `attention_mask` [B, 1, T, T]: see `causal_mask`.
        """
        embedding = self.fc_embedding(self.pre_fc_norm_embedding(embeddings))
        streams = self.pre_fc_norm_hidden(stack).unflatten(-1, (self.hc_count, -1))
        stack = (self.fc_hidden(streams) + embedding.unsqueeze(-2)).flatten(-2)
        rotation = self.rotary_emb(stack, positions.expand(3, len(stack), -1))
        stack = self.layers[0](stack, position_embeddings=rotation, attention_mask=attention_mask)
        return self.hyper_connection_mixer(stack), stack

    def tensors(self) -> dict[str, Tensor]:
        """The weights by their names in a checkpoint, BF16."""
        return {PREFIX + name: weight.detach().to("cpu", torch.bfloat16) for name, weight in self.state_dict().items()}


@torch.no_grad()
def make_draft_head(text_model: Any) -> DraftHead:
    """A float32 head that starts as a copy of the target's last layer and mixer, reading its stack as it is."""
    head = DraftHead(text_model.config).float()
    last = max(i for i, kind in enumerate(text_model.config.layer_types) if kind == "indexed_attention")
    head.layers[0].load_state_dict(text_model.layers[last].state_dict())
    head.hyper_connection_mixer.load_state_dict(text_model.hyper_connection_mixer.state_dict())
    nn.init.eye_(head.fc_hidden.weight)
    nn.init.normal_(head.fc_embedding.weight, std=0.1 * head.fc_embedding.in_features**-0.5)
    return head


def causal_mask(length: int) -> Tensor:
    """What is added to attention scores [1, 1, length, length]; all attention of transformers takes it so."""
    return torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
