"""How many drafts of the demo's draft head its target accepts."""

from __future__ import annotations

from typing import Any

import torch
from demo_data import cut_windows
from demo_draft_training import STEP_WEIGHTS, ChainedDrafts
from torch import Tensor

WINDOW = 512
PROMPTS, PROMPT_TOKENS, GREEDY_TOKENS = 16, 64, 192


@torch.no_grad()
def evaluate_drafts(drafts: ChainedDrafts, writer: Any, heldout: Tensor) -> dict[str, Any]:
    """Acceptance of drafts 1 to 3 on the text `heldout` [N], and on greedy text that `writer` makes of pieces of it.

    `writer` is the target as transformers has it, which can generate.
    `greedy`: the share of places where draft k is the target's most likely token, of those where the drafts before it
    were (in held-out text: where the text itself stands for the drafts before it).
    `sampled`: the mean probability with which rejection sampling at temperature 1 accepts draft k there.
    """
    prompts = heldout[: heldout.numel() // PROMPTS * PROMPTS].view(PROMPTS, -1)[:, :PROMPT_TOKENS]
    written = writer.generate(prompts, do_sample=False, max_new_tokens=GREEDY_TOKENS, eos_token_id=None)
    return {
        "heldout": accept_heldout(drafts, heldout),
        "own greedy text": _accept(drafts, written, PROMPT_TOKENS, chained=True),
    }


def accept_heldout(drafts: ChainedDrafts, heldout: Tensor) -> dict[str, Any]:
    """The part of `evaluate_drafts` on the text `heldout` [N]."""
    return _accept(drafts, cut_windows(heldout, WINDOW + drafts.target.ratio)[:, :-1], 0, chained=False)


@torch.no_grad()
def _accept(drafts: ChainedDrafts, rows: Tensor, first: int, chained: bool) -> dict[str, Any]:
    """Of chains that begin at `first` or later in `rows` [B, T]."""
    steps = len(STEP_WEIGHTS)
    hits: list[list[Tensor]] = [[] for _ in range(steps)]
    overlaps: list[list[Tensor]] = [[] for _ in range(steps)]
    for tokens in rows.split(4):
        target = drafts.target.run(tokens)
        length = tokens.shape[1] - drafts.target.ratio
        alive = torch.ones(len(tokens), length - first, dtype=torch.bool)
        for step, logits in enumerate(drafts.run(tokens, target.stack[:, :length], steps), start=1):
            wanted = target.logits[:, step : step + length][:, first:]
            hit = logits[:, first:].argmax(-1) == wanted.argmax(-1)
            hits[step - 1].append(hit[alive])
            overlaps[step - 1].append(torch.minimum(logits[:, first:].softmax(-1), wanted.softmax(-1)).sum(-1)[alive])
            alive = alive & hit if chained else alive
    return {
        "places": sum(hit.numel() for hit in hits[0]),
        "greedy": [round(torch.cat(hit).float().mean().item(), 3) for hit in hits],
        "sampled": [round(torch.cat(overlap).mean().item(), 3) for overlap in overlaps],
    }
