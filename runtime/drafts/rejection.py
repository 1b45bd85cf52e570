"""Rejection sampling: what the next token of a row is drawn from when a draft of it was sampled.

A draft ``d`` of the distribution ``q`` is accepted with probability ``min(1, p[d] / q[d])``, where ``p`` is what the
row would be sampled from without drafts; otherwise the token comes from ``max(p - q, 0)``, normalized. So the token has
the distribution ``p``, whatever ``q`` is. All of it stays on the device of the logits, and nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen4exp_trt.plugins.sample_tokens.noise import exponential_noise

ROWS_AT_ONCE = 16
"""That are worked on together: sorted, those of a vocabulary of 248,320 ids take 160 MB meanwhile."""


@dataclass(frozen=True)
class DraftedToken:
    """A token that was sampled from ``probs`` (float32 ``[V]``, summing to 1) to be the token of a row of logits."""

    token_id: int
    probs: Tensor


def filtered_probs(logits: Tensor, filters: Mapping[str, Tensor], vocab_limit: int | None) -> Tensor:
    """What ``q4e::sample_tokens`` draws from: float32 ``[N, V]``, each row summing to 1.

    ``logits``: float32 ``[N, V]``, behind the penalties. ``filters``: ``temperatures`` (above 0), ``top_k``, ``top_p``
    and ``min_p`` of each row, on the CPU. A row with NaN or +inf, or of only -inf, is NaN.
    """
    probs = torch.zeros_like(logits)
    for first in range(0, len(logits), ROWS_AT_ONCE):
        rows = slice(first, first + ROWS_AT_ONCE)
        of_rows = {name: column[rows] for name, column in filters.items()}
        values = logits[rows, :vocab_limit]
        scaled = (values - values.amax(-1, keepdim=True)) / _column(of_rows["temperatures"], logits)
        dropped = scaled < _lowest_kept(scaled, of_rows)
        probs[rows, :vocab_limit] = scaled.masked_fill(dropped, -torch.inf).softmax(-1)
    return probs


def _lowest_kept(scaled: Tensor, filters: Mapping[str, Tensor]) -> Tensor:
    """`sample_tokens.op.lowest_kept` of every row, ``[N, 1]``."""
    size, top_k = scaled.shape[1], filters["top_k"]
    widths = torch.where(top_k > 0, top_k, size).clamp(max=size)
    floor = _column(filters["min_p"], scaled).log()
    if int(widths.min()) == size and bool((filters["top_p"] >= 1).all()):
        return floor
    best = scaled.topk(int(widths.max())).values
    top_p = _column(filters["top_p"], scaled).double()
    ranks = torch.arange(best.shape[1], device=scaled.device)
    is_candidate = (best >= floor) & (ranks < _column(widths, scaled))
    mass = best.double().exp() * is_candidate
    before = mass.cumsum(-1) - mass
    is_kept = is_candidate & ((before < top_p * mass.sum(-1, keepdim=True)) | (top_p >= 1))
    return best.gather(1, is_kept.sum(-1, keepdim=True).clamp(min=1) - 1)


def logits_given_drafts(probs: Tensor, drafts: Sequence[DraftedToken], seeds: Tensor, offsets: Tensor) -> Tensor:
    """Logits ``[N, V]`` to draw each row's token from, at temperature 1 and without filters.

    Those of a row whose draft is accepted hold nothing but the draft; those of another never hold it. ``probs``: what
    the rows are sampled from without drafts (`filtered_probs`; the logits of a row with NaN are all -inf). ``seeds``
    and ``offsets`` (int64 ``[N]``, on the CPU): the draws that decide whether a row's draft is accepted.
    """
    device = probs.device
    token_ids = torch.tensor([draft.token_id for draft in drafts]).to(device, non_blocking=True)[:, None]
    drafted = torch.stack([draft.probs.to(device) for draft in drafts])
    wanted, proposed = probs.gather(1, token_ids), drafted.gather(1, token_ids)
    # An exponential exceeds log(q / p) with the probability p / q.
    noise = exponential_noise(seeds, offsets, torch.zeros_like(seeds)).to(device, non_blocking=True)[:, None]
    is_accepted = noise > (proposed / wanted).log()
    rest = (probs - drafted).clamp(min=0)
    # Rounding may leave nothing where both are equal up to it: then a draw from either is a draw from both.
    rest = torch.where(rest.sum(-1, keepdim=True) > 0, rest, probs)
    ids = torch.arange(probs.shape[1], device=device)
    logits = torch.where(is_accepted, (ids == token_ids).float(), rest).log()
    return logits.masked_fill(probs.isnan(), -torch.inf)


def _column(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.device, non_blocking=True)[:, None]
