"""One token of each row of logits: greedy, or temperature with min-p, top-k and top-p."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.plugins.sample_tokens.cases import CASES
from qwen4exp_trt.plugins.sample_tokens.launch import launches
from qwen4exp_trt.plugins.sample_tokens.noise import exponential_noise
from qwen4exp_trt.plugins.sample_tokens.reference import reference
from qwen4exp_trt.plugins.spec import Attr, OpSpec, TensorArg


def lowest_kept(scaled: Tensor, top_k: int, top_p: Tensor, min_p: Tensor) -> Tensor:
    """The lowest of the logits ``scaled`` ``[N]``, of which the best is 0, that min-p, top-k and top-p keep."""
    width = min(top_k, len(scaled)) if top_k > 0 else len(scaled)
    if width == len(scaled) and top_p >= 1:
        return torch.maximum(min_p.log(), scaled.min())
    best = scaled.topk(width).values
    floor = min_p.log()
    mass = best.double().exp().masked_fill(best < floor, 0.0)
    before = mass.cumsum(0) - mass
    is_kept = (best >= floor) & ((before < top_p.double() * mass.sum()) | (top_p >= 1))
    return best[is_kept.sum() - 1]


def _candidates(logits: Tensor, temperature: Tensor, filters: tuple[int, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Ids that a row may get, and their scaled logits."""
    if not temperature > 0:
        best = logits.argmax(keepdim=True)
        return best, logits[best]
    scaled = (logits - logits.max()) / temperature
    is_filtered = filters[0] > 0 or bool(filters[1] < 1) or bool(filters[2] > 0)
    kept = scaled >= lowest_kept(scaled, *filters) if is_filtered else torch.ones_like(scaled, dtype=torch.bool)
    ids = kept.nonzero().squeeze(1)
    return ids, scaled[ids]


def body(
    logits: Tensor,
    raw_logits: Tensor,
    temperatures: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    offsets: Tensor,
    vocab_limit: int,
) -> tuple[Tensor, Tensor, Tensor]:
    count, vocab_size = logits.shape
    num_ids = min(vocab_limit, vocab_size) if vocab_limit > 0 else vocab_size
    values, raw = logits[:, :num_ids].float(), raw_logits.float()
    log_sums = raw.logsumexp(-1)
    is_usable = log_sums.isfinite() & (values.amax(-1) > -torch.inf)
    token_ids = torch.full((count,), -1, dtype=torch.int32)
    logprobs, ranks = torch.zeros(count), torch.zeros(count, dtype=torch.int32)
    rows = is_usable.nonzero().squeeze(1).tolist()
    if not rows:
        return token_ids, logprobs, ranks
    candidates = [
        _candidates(values[row], temperatures[row], (int(top_k[row]), top_p[row], min_p[row])) for row in rows
    ]
    ids, scaled = (torch.cat(parts) for parts in zip(*candidates, strict=True))
    counts = [len(each) for each, _ in candidates]
    of_row = torch.tensor(rows).repeat_interleave(torch.tensor(counts))
    scores = scaled - exponential_noise(seeds[of_row], offsets[of_row].long(), ids).log()
    for row, own, score in zip(rows, ids.split(counts), scores.split(counts), strict=True):
        token = own[score.argmax()]
        token_ids[row] = token
        logprobs[row] = raw[row, token] - log_sums[row]
        ranks[row] = (raw[row, :num_ids] > raw[row, token]).sum() + 1
    return token_ids, logprobs, ranks


SPEC = OpSpec(
    name="sample_tokens",
    version=1,
    inputs=(
        TensorArg("logits", ("L", "V")),  # sampled from: behind the penalties
        TensorArg("raw_logits", ("L", "V")),  # reported of; may be the same tensor
        TensorArg("temperatures", ("L",), "float32"),
        TensorArg("top_k", ("L",), "int32"),
        TensorArg("top_p", ("L",), "float32"),
        TensorArg("min_p", ("L",), "float32"),
        TensorArg("seeds", ("L",), "int64"),
        TensorArg("offsets", ("L",), "int32"),
    ),
    outputs=(
        TensorArg("token_ids", ("L",), "int32"),
        TensorArg("logprobs", ("L",), "float32"),
        TensorArg("ranks", ("L",), "int32"),
    ),
    attrs=(Attr("vocab_limit", "int"),),
    body=body,
    reference=reference,
    cases=CASES,
    launches=launches,
    tolerance={torch.float32: 2e-6, torch.bfloat16: 2e-6},
)
