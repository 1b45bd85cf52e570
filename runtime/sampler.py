"""Next tokens from logits, for a batch of requests that each have their own sampling parameters.

Every step works on a row alone or keeps rows apart, and noise is a function of the request's own seed and of how many
tokens it has: what a seeded request samples does not depend on the requests beside it, nor on where the logits are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from qwen4exp_trt.plugins.registry import all_specs
from qwen4exp_trt.runtime.drafts.rejection import ROWS_AT_ONCE, DraftedToken, filtered_probs, logits_given_drafts
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.specs import TensorSpec
from qwen4exp_trt.runtime.weights import dtype_from_name

SAMPLING_INPUTS = tuple(
    TensorSpec(name, ("L",), dtype)
    for name, dtype in (
        ("temperatures", "float32"),
        ("top_k", "int32"),
        ("top_p", "float32"),
        ("min_p", "float32"),
        ("seeds", "int64"),
        ("offsets", "int32"),
    )
)
"""What ``q4e::sample_tokens`` takes for each row of logits. Zeros are greedy."""
_FILTERS = ("temperatures", "top_k", "top_p", "min_p")
"""Those that are of the parameters: `SamplingParams.filters`."""
_NUMPY_DTYPES = {"temperatures": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32}


class NoiseStream(IntEnum):
    """What noise is drawn for. Streams of one request share nothing: they are apart in the offsets of its draws."""

    SAMPLE = 0
    """The token of a row that has no draft, or one that was not sampled."""
    DRAFT = 1
    """A sampled draft."""
    ACCEPT = 2
    """Whether a sampled draft is accepted."""
    RESIDUAL = 3
    """The token in place of a sampled draft that is not."""

    def offset(self, index: int) -> int:
        """Of the draw for output token ``index``, for which 24 bits are enough (`limits`: a sequence's length)."""
        return self << 24 | index


@dataclass(slots=True)  # not frozen: there is one a token, and freezing triples what it takes to make it
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

    @property
    def num_output_tokens(self) -> int:
        return len(self._output_token_ids)

    def masks(self, vocab_size: int, device: torch.device) -> Tensor:
        """Bool ``[2, vocab_size]``: row 0 the tokens of prompt and output, row 1 those of the output."""
        if self._masks is None:
            self._masks = torch.zeros(2, vocab_size, dtype=torch.bool, device=device)
            self._masks[0, torch.tensor(self._prompt_token_ids, dtype=torch.int64, device=device)] = True
        unmarked = self._output_token_ids[self._num_marked :]
        self._masks[:, torch.tensor(unmarked, dtype=torch.int64, device=device)] = True
        self._num_marked += len(unmarked)
        return self._masks


@dataclass(slots=True)  # not frozen, as above: there is one a row
class SampleRequest:
    """What decides about the next token of one request besides its logits."""

    params: SamplingParams
    history: TokenHistory
    seed: int
    """Of all draws of the request."""
    ahead: tuple[int, ...] = ()
    """Tokens behind the history that the row of logits has read: drafts, taken to be accepted."""
    drafted: DraftedToken | None = None
    """The draft of the token itself, if it was sampled. (Any other draft is accepted if it is the token sampled.)"""

    @property
    def is_plain(self) -> bool:
        """Whether the token comes from the logits as they are."""
        return not self.params.has_penalties and self.drafted is None

    @property
    def num_tokens(self) -> int:
        """How many the output has before the row's."""
        return self.history.num_output_tokens + len(self.ahead)

    def offset(self, stream: NoiseStream) -> int:
        """Of the draw of the row's token."""
        return stream.offset(self.num_tokens)


def seed_of(params: SamplingParams) -> int:
    """The seed of a request: its own, or one that torch's default generator draws."""
    return int(torch.randint(2**63 - 1, ()).item()) if params.seed is None else params.seed


def sample(logits: Tensor, requests: Sequence[SampleRequest], vocab_limit: int | None) -> list[SampledToken | None]:
    """Sample one token per row of ``logits`` (float32 ``[N, V]``, left as they are).

    In order: repetition and presence penalty, then greedy (the lowest id among equals) or temperature, min-p, top-k
    and top-p. Tokens that tie with the last one kept by a filter are kept too. Ids from ``vocab_limit`` on (rows of
    the head that no token has) are never sampled or reported. None for a row with NaN, +inf or only -inf.
    """
    assert logits.dtype == torch.float32, f"logits are {logits.dtype}, not float32"
    assert len(requests) == len(logits), "one request for each row of logits"
    if not requests:
        return []
    return report(draw_rows(logits, requests, vocab_limit).cpu(), logits, requests, vocab_limit)


def draw_rows(logits: Tensor, requests: Sequence[SampleRequest], vocab_limit: int | None) -> Tensor:
    """`draw` for ``requests`` with penalties and drafts, on the device of ``logits`` (float32)."""
    operands = sampling_operands(requests)
    values = apply_penalties(logits, requests)
    rows = [row for row, request in enumerate(requests) if request.drafted is not None]
    if rows:
        values = _verify_drafts(values, rows, requests, operands, vocab_limit)
    there = {name: value.to(logits.device, non_blocking=True) for name, value in operands.items()}
    return draw(values, logits, there, vocab_limit)


def _verify_drafts(
    logits: Tensor,
    rows: list[int],
    requests: Sequence[SampleRequest],
    operands: dict[str, Tensor],
    vocab_limit: int | None,
) -> Tensor:
    """``logits`` with others in ``rows``, whose drafts were sampled; their ``operands`` become those to draw with."""
    replaced = logits.clone()
    for first in range(0, len(rows), ROWS_AT_ONCE):
        some = rows[first : first + ROWS_AT_ONCE]
        drafts = [draft for row in some if (draft := requests[row].drafted) is not None]
        probs = filtered_probs(logits[some], {name: value[some] for name, value in operands.items()}, vocab_limit)
        offsets = torch.tensor([requests[row].offset(NoiseStream.ACCEPT) for row in some])
        replaced[some] = logits_given_drafts(probs, drafts, operands["seeds"][some], offsets)
    unfiltered = {"temperatures": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    for name, value in unfiltered.items():
        operands[name][rows] = value
    residual = [requests[row].offset(NoiseStream.RESIDUAL) for row in rows]
    operands["offsets"][rows] = torch.tensor(residual, dtype=torch.int32)
    return replaced


def sampling_operands(requests: Sequence[SampleRequest]) -> dict[str, Tensor]:
    """The `SAMPLING_INPUTS` of one row for each request, on the CPU."""
    filters = zip(*[request.params.filters for request in requests], strict=True) if requests else [()] * len(_FILTERS)
    arrays = {
        **{name: np.array(column, _NUMPY_DTYPES[name]) for name, column in zip(_FILTERS, filters, strict=True)},
        "seeds": np.array([request.seed % 2**64 for request in requests], dtype=np.uint64).view(np.int64),
        "offsets": np.array([request.num_tokens for request in requests], dtype=np.int32)
        + NoiseStream.SAMPLE.offset(0),
    }
    return {spec.name: torch.from_numpy(arrays[spec.name]) for spec in SAMPLING_INPUTS}


def greedy_operands(num_rows: int) -> dict[str, Tensor]:
    """The `SAMPLING_INPUTS` of rows whose best tokens are wanted, on the CPU."""
    return {spec.name: torch.zeros(num_rows, dtype=dtype_from_name(spec.dtype)) for spec in SAMPLING_INPUTS}


def draw(logits: Tensor, raw_logits: Tensor, operands: Mapping[str, Tensor], vocab_limit: int | None) -> Tensor:
    """What ``q4e::sample_tokens`` gives for each row, as int32 ``[3, N]``: token id, bits of the logprob, rank.

    Tokens come from ``logits``, logprobs and ranks from ``raw_logits``. Nothing waits for a GPU.
    """
    all_specs()
    others = [operands[spec.name] for spec in SAMPLING_INPUTS]
    ids, logprobs, ranks = torch.ops.q4e.sample_tokens(logits, raw_logits, *others, vocab_limit or 0)
    return torch.stack([ids, logprobs.view(torch.int32), ranks])


def report(
    drawn: Tensor, logits: Tensor, requests: Sequence[SampleRequest], vocab_limit: int | None
) -> list[SampledToken | None]:
    """The tokens of the first rows of ``drawn`` (`draw`, on the CPU); ``logits`` are the raw ones of any dtype."""
    values = drawn.numpy()
    ids, logprobs, ranks = values[0].tolist(), values[1].view(np.float32).tolist(), values[2].tolist()
    sampled: list[SampledToken | None] = []
    for row, request in enumerate(requests):
        top, count = None, request.params.logprobs
        if ids[row] >= 0 and count is not None:
            top = _top_logprobs(logits[row].float(), count, vocab_limit)
        sampled.append(None if ids[row] < 0 else SampledToken(ids[row], logprobs[row], ranks[row], top))
    return sampled


def apply_penalties(
    logits: Tensor, requests: Sequence[SampleRequest], vocab_size: int | None = None, token_ids: Tensor | None = None
) -> Tensor:
    """``logits`` with each request's repetition and presence penalty.

    Their columns are ids, or stand for ``token_ids`` (int64 on their device) of a vocabulary of ``vocab_size``.
    """
    rows = [row for row, request in enumerate(requests) if request.params.has_penalties]
    if not rows:
        return logits
    masks = [_masks(requests[row], vocab_size or logits.shape[1], logits.device) for row in rows]
    seen, generated = torch.stack(masks, dim=1)
    if token_ids is not None:
        seen, generated = seen[:, token_ids], generated[:, token_ids]
    repetition = _column([requests[row].params.repetition_penalty for row in rows], logits)
    presence = _column([requests[row].params.presence_penalty for row in rows], logits)
    values = logits[rows]
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    penalized = logits.clone()
    penalized[rows] = torch.where(seen, repeated, values) - presence * generated
    return penalized


def _masks(request: SampleRequest, vocab_size: int, device: torch.device) -> Tensor:
    """`TokenHistory.masks` of the history and the tokens behind it."""
    masks = request.history.masks(vocab_size, device)
    if request.ahead:
        masks = masks.clone()
        masks[:, torch.tensor(request.ahead, device=device)] = True
    return masks


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(1)


def _top_logprobs(logits: Tensor, count: int, vocab_limit: int | None) -> dict[int, float]:
    logprobs = logits.log_softmax(-1)[:vocab_limit]
    values, token_ids = logprobs.topk(min(count, len(logprobs)))
    pairs = zip(token_ids.tolist(), values.tolist(), strict=True)
    return dict(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
