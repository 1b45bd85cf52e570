"""Next tokens from logits, for a batch of requests that each have their own sampling parameters.

Every step works on a row alone or keeps rows apart, and noise comes from the request's own generator: what a seeded
request samples does not depend on the requests beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qwen4exp_trt.runtime.sampling_params import SamplingParams


@dataclass(frozen=True)
class SampledToken:
    """A sampled token and, from the raw logits, its log-probability and rank (1 = most likely).

    ``top_logprobs`` holds the ``SamplingParams.logprobs`` most likely tokens, best first (the sampled token only if it
    is one of them), or None where no log-probabilities were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top_logprobs: dict[int, float] | None


class TokenHistory:
    """The tokens of one request, as the penalties need them: masks over the vocabulary, made on first use."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self._prompt_token_ids = tuple(prompt_token_ids)
        self._output_token_ids: list[int] = []
        self._num_marked = 0
        self._masks: Tensor | None = None

    def append(self, token_id: int) -> None:
        """Add a sampled token."""
        self._output_token_ids.append(token_id)

    def masks(self, vocab_size: int, device: torch.device) -> Tensor:
        """Bool ``[2, vocab_size]``: row 0 the tokens of prompt and output, row 1 those of the output."""
        if self._masks is None:
            self._masks = torch.zeros(2, vocab_size, dtype=torch.bool, device=device)
            self._masks[0, torch.tensor(self._prompt_token_ids, dtype=torch.int64, device=device)] = True
        unmarked = self._output_token_ids[self._num_marked :]
        self._masks[:, torch.tensor(unmarked, dtype=torch.int64, device=device)] = True
        self._num_marked += len(unmarked)
        return self._masks


def generator_from_seed(seed: int | None, device: torch.device | str = "cpu") -> torch.Generator | None:
    """The generator of a request with a seed; None without one (torch's default generator is used then)."""
    return None if seed is None else torch.Generator(device).manual_seed(seed)


def sample(
    logits: Tensor,
    params: Sequence[SamplingParams],
    histories: Sequence[TokenHistory],
    generators: Sequence[torch.Generator | None],
    vocab_limit: int | None,
) -> list[SampledToken]:
    """Sample one token per row of ``logits`` (float32 ``[N, V]``, left as they are).

    In order: repetition and presence penalty, then greedy (the lowest id among equals) or temperature, min-p, top-k
    and top-p. Tokens that tie with the last one kept by a filter are kept too. Ids from ``vocab_limit`` on (rows of
    the head that no token has) are never sampled or reported. The generators are advanced; the histories are read.
    Every row must be one that `can_sample`.
    """
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32, f"logits are {logits.dtype}, not float32"
    assert len(params) == len(histories) == len(generators) == num_rows, "one entry per row of logits"
    if num_rows == 0:
        return []
    log_sums = logits.logsumexp(-1)
    assert log_sums.isfinite().all(), "rows that can_sample refuses"
    num_tokens = vocab_size if vocab_limit is None else min(vocab_limit, vocab_size)
    penalized = _apply_penalties(logits, params, histories)[:, :num_tokens]
    token_ids = penalized.argmax(-1)
    random_rows = [row for row, row_params in enumerate(params) if not row_params.is_greedy]
    if random_rows:
        token_ids[random_rows] = _sample_random(
            penalized[random_rows], [params[row] for row in random_rows], [generators[row] for row in random_rows]
        )
    return _report(logits[:, :num_tokens], log_sums, token_ids, params)


def can_sample(logits: Tensor) -> list[bool]:
    """For each row of ``logits`` ``[N, V]`` whether it has no NaN, no +inf, and not only -inf."""
    return logits.logsumexp(-1).isfinite().tolist()


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _apply_penalties(logits: Tensor, params: Sequence[SamplingParams], histories: Sequence[TokenHistory]) -> Tensor:
    rows = [row for row, row_params in enumerate(params) if row_params.has_penalties]
    if not rows:
        return logits
    masks = [histories[row].masks(logits.shape[1], logits.device) for row in rows]
    seen, generated = torch.stack(masks, dim=1)
    repetition = _column([params[row].repetition_penalty for row in rows], logits)
    presence = _column([params[row].presence_penalty for row in rows], logits)
    values = logits[rows]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    penalized = logits.clone()
    penalized[rows] = torch.where(seen, repeated, values) - presence * generated
    return penalized


def _sample_random(
    logits: Tensor, params: Sequence[SamplingParams], generators: Sequence[torch.Generator | None]
) -> Tensor:
    """Token ids int64 ``[N]``: the argmax of probability over exponential noise, taken in log space."""
    temperature = _column([row_params.temperature for row_params in params], logits)
    # The best token is moved to 0 first, so that no temperature can overflow it.
    scaled = (logits - logits.amax(-1, keepdim=True)) / temperature
    noise = torch.stack([_exponential_noise(logits.shape[1], generator, logits.device) for generator in generators])
    return (_apply_filters(scaled, params) - noise.log()).argmax(-1)


def _exponential_noise(size: int, generator: torch.Generator | None, device: torch.device) -> Tensor:
    noise = torch.empty(size, device=device if generator is None else generator.device)
    # A zero would beat every token, filtered ones included.
    return noise.exponential_(generator=generator).clamp_min_(torch.finfo(noise.dtype).tiny).to(device)


def _apply_filters(scaled: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """``scaled`` ``[N, V]`` with -inf for the tokens that min-p, top-k or top-p drop."""
    rows_by_width: dict[int, list[int]] = {}
    for row, row_params in enumerate(params):
        if row_params.has_filters:
            width = scaled.shape[1] if row_params.top_k <= 0 else min(row_params.top_k, scaled.shape[1])
            rows_by_width.setdefault(width, []).append(row)
    filtered = scaled.clone()
    for width, rows in rows_by_width.items():
        values = scaled[rows]
        lowest = _lowest_kept(values.topk(width).values, [params[row] for row in rows])
        filtered[rows] = values.masked_fill(values < lowest, -torch.inf)
    return filtered


def _lowest_kept(best: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """The lowest logit ``[N, 1]`` that min-p and top-p keep of ``best`` ``[N, top_k]``, which is in falling order."""
    floor = best[:, :1] + _column([row_params.min_p for row_params in params], best).log()
    probs = best.masked_fill(best < floor, -torch.inf).softmax(-1)
    # top_p 1 keeps all, whatever the rounding of the sum.
    top_p = _column([row_params.top_p if row_params.top_p < 1 else torch.inf for row_params in params], best)
    is_kept = (best >= floor) & (probs.cumsum(-1) - probs < top_p)
    return best.gather(1, is_kept.sum(-1, keepdim=True) - 1)


def _report(
    logits: Tensor, log_sums: Tensor, token_ids: Tensor, params: Sequence[SamplingParams]
) -> list[SampledToken]:
    chosen = logits.gather(1, token_ids.unsqueeze(1))
    logprobs = (chosen.squeeze(1) - log_sums).tolist()
    ranks = ((logits > chosen).sum(-1) + 1).tolist()
    sampled = []
    for row, token_id in enumerate(token_ids.tolist()):
        count = params[row].logprobs
        top = None if count is None else _top_logprobs(logits[row] - log_sums[row], count)
        sampled.append(SampledToken(token_id, logprobs[row], ranks[row], top))
    return sampled


def _top_logprobs(logprobs: Tensor, count: int) -> dict[int, float]:
    values, token_ids = logprobs.topk(min(count, len(logprobs)))
    pairs = zip(token_ids.tolist(), values.tolist(), strict=True)
    return dict(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
