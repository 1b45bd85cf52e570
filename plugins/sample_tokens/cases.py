"""Sample operands."""

from __future__ import annotations

from typing import Any

import torch

from qwen4exp_trt.plugins.sample_batches import normal
from qwen4exp_trt.plugins.spec import Case

ROWS, VOCAB = 6, 203


def _case(
    name: str,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    vocab_limit: int = 0,
    step: float = 0.0,
    penalized: bool = False,
    unusable: bool = False,
) -> Case:
    """``step``: logits are multiples of it, so that many tie."""

    def make(dtype: torch.dtype, generator: torch.Generator) -> dict[str, Any]:
        logits = normal(generator, ROWS, VOCAB, scale=3)
        logits = (logits / step).round() * step if step else logits
        raw = logits + (torch.randint(0, 3, logits.shape, generator=generator) if penalized else 0)
        if unusable:
            raw[0, 7], raw[2, 100], raw[3], raw[4, :50] = torch.nan, torch.inf, -torch.inf, -torch.inf
            logits = raw.clone()
        spread = torch.arange(ROWS)
        return {
            "logits": logits.to(dtype),
            "raw_logits": raw.to(dtype),
            "temperatures": temperature * (1 + 0.1 * spread),
            "top_k": (top_k + spread * (top_k > 0)).int(),
            "top_p": torch.full((ROWS,), top_p),
            "min_p": torch.full((ROWS,), min_p),
            "seeds": torch.randint(-(2**63), 2**63 - 1, (ROWS,), generator=generator),
            "offsets": torch.randint(0, 2**31 - 1, (ROWS,), generator=generator).int(),
            "vocab_limit": vocab_limit,
        }

    return Case(name, make)


CASES = (
    _case("greedy", temperature=0),
    _case("greedy, ties, penalties", temperature=0, step=2, vocab_limit=190, penalized=True),
    _case("temperature"),
    _case("temperature, penalties", temperature=1.5, vocab_limit=150, penalized=True),
    _case("top-k", top_k=5),
    _case("top-p", top_p=0.7),
    _case("min-p", min_p=0.1, temperature=1.2),
    _case("all filters, ties", temperature=1.3, top_k=9, top_p=0.8, min_p=0.02, step=1, vocab_limit=187),
    _case("all filters, penalties", top_k=40, top_p=0.95, min_p=0.01, penalized=True),
    _case("unusable rows", top_k=20, top_p=0.9, unusable=True),
    _case("unusable rows, greedy", temperature=0, unusable=True),
)
