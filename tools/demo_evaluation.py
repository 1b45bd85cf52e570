"""What the demo checkpoint is worth, measured with transformers' own layers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from demo_data import cut_windows
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoTokenizer, Qwen4ExpForConditionalGeneration

EVALUATION_LENGTH = 512
SAMPLE_PROMPTS = (
    "Elizabeth was",
    "It was a fine morning, and",
    "The king said to his servants,",
    "Mr. Darcy looked at her in silence.",
)
SAMPLE_CHATS = ("Tell me about Emma.", "Who are you?")
SAMPLE_TOKENS = 200


@torch.no_grad()
def evaluate_checkpoint(checkpoint: Path, heldout: Path) -> dict[str, Any]:
    """Perplexity of fresh windows of 512 tokens, most of them past the indexer's budget, and greedy samples."""
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model: Any = Qwen4ExpForConditionalGeneration.from_pretrained(checkpoint).eval()
    text = heldout.read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer.backend_tokenizer.encode(text).ids)
    losses = torch.cat([_token_losses(model, rows) for rows in cut_windows(ids, EVALUATION_LENGTH).split(8)])
    config = model.config.text_config
    inert = config.indexer_budget + config.indexer_compress_ratio - 1
    prompts = {prompt: tokenizer(prompt, return_tensors="pt").input_ids for prompt in SAMPLE_PROMPTS}
    for request in SAMPLE_CHATS:
        messages = [{"role": "user", "content": request}]
        chat = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, enable_thinking=False, return_tensors="pt"
        )
        prompts[f"chat: {request}"] = chat["input_ids"]
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "heldout_tokens": losses.numel(),
        "window": EVALUATION_LENGTH,
        "perplexity": math.exp(losses.mean()),
        f"perplexity_positions_below_{inert}": math.exp(losses[:, :inert].mean()),
        f"perplexity_positions_from_{inert}": math.exp(losses[:, inert:].mean()),
        "characters_per_token": len(text) / ids.numel(),
        "greedy": {prompt: _generate(model, tokenizer, prompt_ids) for prompt, prompt_ids in prompts.items()},
    }


def _token_losses(model: Any, rows: Tensor) -> Tensor:
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits.float()
    return F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")


def _generate(model: Any, tokenizer: Any, prompt_ids: Tensor) -> str:
    output = model.generate(prompt_ids, do_sample=False, max_new_tokens=SAMPLE_TOKENS)
    return tokenizer.decode(output[0, prompt_ids.shape[1] :])
