"""How well a bundle predicts a text, and how far its predictions are from those of another bundle.

The text is cut into windows of equal length that do not overlap, the last one shorter. Each is scored on its own, so
its first token has no prediction and is not counted. All distributions are over the tokenizer's tokens: a model may
have more rows in its head. Log-probabilities are float32, in nats.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from qwen4exp_trt.errors import BundleError, RequestError
from qwen4exp_trt.runtime.llm import LLM
from qwen4exp_trt.runtime.progress_line import Progress
from qwen4exp_trt.runtime.tokenizer import Tokenizer

_ROWS = 64
"""Distributions in float32 at a time; the vocabulary of the released model makes each one 1 MB."""

_TAIL = 0.999


@dataclass(frozen=True)
class Comparison:
    """How far the next-token distributions are from those of the base."""

    base_perplexity: float
    mean_kl: float
    """Mean over the tokens of KL(base || this)."""
    tail_kl: float
    """The 99.9th percentile of it."""
    top1_agreement: float
    """Share of the tokens where both find the same one most likely."""


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate`."""

    num_tokens: int
    """Predicted tokens: those of the text but the first of each window."""
    num_windows: int
    window: int
    perplexity: float
    comparison: Comparison | None


@dataclass(frozen=True)
class _Window:
    """What is kept of the predictions of one window, for each token ``[T - 1]``; the last three with a base only."""

    loss: Tensor
    base_loss: Tensor
    kl: Tensor
    agrees: Tensor


def default_window(max_seq_len: int) -> int:
    """Tokens of a window if nobody asks for another number."""
    return min(512, max_seq_len)


@torch.no_grad()
def evaluate(
    llm: LLM,
    text: str,
    *,
    window: int | None = None,
    max_tokens: int | None = None,
    base: LLM | None = None,
    progress: Progress = lambda done, total: None,
) -> Evaluation:
    """Perplexity of the first ``max_tokens`` tokens of ``text``, and the distance of ``llm`` from ``base``.

    ``window``: tokens of a window, at most ``max_seq_len`` of either bundle. Logits of one window at a time are in
    memory. Raises `RequestError` for a text, window or base that does not allow it, `BundleError` for logits that are
    not finite.
    """
    llms = [llm] if base is None else [llm, base]
    longest = min(each.manifest.limits.max_seq_len for each in llms)
    window = default_window(longest) if window is None else window
    if not 2 <= window <= longest:
        raise RequestError(f"the window is {window} tokens; it must have 2 to {longest}, the max_seq_len of the bundle")
    tokenizer = _common_tokenizer(llms)
    token_ids = _encode(tokenizer, text, max_tokens)
    windows = list(_cut(token_ids, window))
    results = []
    for index, ids in enumerate(windows):
        results.append(_score_window(llms, ids, tokenizer.vocab_size, index))
        progress(index + 1, len(windows))
    return _summarize(results, window, has_base=base is not None)


def _common_tokenizer(llms: Sequence[LLM]) -> Tokenizer:
    """The tokenizer of all; `RequestError` if they do not give the same meaning to every id."""
    tokenizers = [llm.tokenizer for llm in llms if llm.tokenizer is not None]
    if len(tokenizers) < len(llms):
        raise RequestError(
            "a bundle without tokenizer cannot read text; build it from a checkpoint with tokenizer.json"
        )
    first, other = tokenizers[0], tokenizers[-1]
    if first.vocab_size != other.vocab_size:
        raise RequestError(
            f"the bundles have different tokenizers, of {first.vocab_size} and {other.vocab_size} ids; "
            "only bundles of one vocabulary can be compared"
        )
    differing = (id for id in range(first.vocab_size) if first.token_bytes(id) != other.token_bytes(id))
    if first is not other and (token_id := next(differing, None)) is not None:
        raise RequestError(
            f"the bundles have different tokenizers: token {token_id} is {first.token_bytes(token_id)!r} in one and "
            f"{other.token_bytes(token_id)!r} in the other; only bundles of one vocabulary can be compared"
        )
    return first


def _encode(tokenizer: Tokenizer, text: str, max_tokens: int | None) -> list[int]:
    if max_tokens is not None and max_tokens < 2:
        raise RequestError(f"max_tokens is {max_tokens}; a text needs two tokens, the first of which is not predicted")
    token_ids = tokenizer.encode(text, add_special_tokens=False)[:max_tokens]
    if len(token_ids) < 2:
        raise RequestError(f"the text has {len(token_ids)} tokens; it needs two, the first of which is not predicted")
    return token_ids


def _cut(token_ids: Sequence[int], window: int) -> Iterator[Sequence[int]]:
    """The windows; a last one of a single token predicts nothing."""
    for start in range(0, len(token_ids) - 1, window):
        yield token_ids[start : start + window]


def _score_window(llms: Sequence[LLM], token_ids: Sequence[int], vocab_size: int, index: int) -> _Window:
    logits = [llm.score(token_ids)[:-1, :vocab_size] for llm in llms]
    for name, rows in zip(("the bundle", "the bundle to compare with"), logits, strict=False):
        if not rows.isfinite().all():
            raise BundleError(f"{name} gives logits that are not finite in window {index} of the text")
    targets = torch.tensor(token_ids[1:], device=logits[0].device)
    parts = zip(targets.split(_ROWS), *(rows.split(_ROWS) for rows in logits), strict=True)
    compared = [_compare(part_targets, *part_logits) for part_targets, *part_logits in parts]
    return _Window(*(torch.cat(column).cpu() for column in zip(*compared, strict=True)))


def _compare(targets: Tensor, logits: Tensor, base_logits: Tensor | None = None) -> tuple[Tensor, ...]:
    """The fields of `_Window` for some rows of ``logits`` ``[R, V]``."""
    log_probs = logits.log_softmax(-1)
    loss = F.nll_loss(log_probs, targets, reduction="none")
    if base_logits is None:
        nothing = loss.new_zeros(0)
        return loss, nothing, nothing, nothing
    base = base_logits.log_softmax(-1)
    kl = F.kl_div(log_probs, base, reduction="none", log_target=True).sum(-1)
    agrees = logits.argmax(-1) == base_logits.argmax(-1)
    return loss, F.nll_loss(base, targets, reduction="none"), kl, agrees


def _summarize(windows: Sequence[_Window], window: int, has_base: bool) -> Evaluation:
    loss, base_loss, kl, agrees = (
        torch.cat([getattr(each, name) for each in windows]).double().numpy()
        for name in ("loss", "base_loss", "kl", "agrees")
    )
    comparison = None
    if has_base:
        comparison = Comparison(
            base_perplexity=_perplexity(base_loss),
            mean_kl=float(kl.mean()),
            tail_kl=float(np.quantile(kl, _TAIL)),
            top1_agreement=float(agrees.mean()),
        )
    return Evaluation(loss.size, len(windows), window, _perplexity(loss), comparison)


def _perplexity(loss: np.ndarray) -> float:
    """Of losses in nats a token; infinite where float64 has no such number."""
    with np.errstate(over="ignore"):
        return float(np.exp(loss.mean()))
