"""Samples drafts from the logits of a draft head, with each request's own parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qwen4exp_trt.runtime.drafts.rejection import filtered_probs
from qwen4exp_trt.runtime.sampler import NoiseStream, SampleRequest, apply_penalties, draw, sampling_operands
from qwen4exp_trt.runtime.step_result import DrawnStep

Drafts = tuple[list[int], list[Tensor] | None]
"""Of one request: token ids, and what each was sampled from (`Sequence.set_drafts`)."""


class DraftSampler:
    """For a head whose logits' columns are all ids, or the ``token_ids`` (int64, ascending) of a reduced vocabulary.

    ``vocab_size`` and ``vocab_limit``: of the model's ids, and from which on there are no tokens.
    """

    def __init__(
        self, token_ids: Tensor | None, vocab_size: int, vocab_limit: int | None, device: torch.device
    ) -> None:
        self.vocab_size, self.token_ids, self.limit = vocab_size, None, vocab_limit
        if token_ids is not None:
            self.token_ids = token_ids.to(device)
            self.limit = None if vocab_limit is None else int((token_ids < vocab_limit).sum())

    def start(self, requests: Sequence[SampleRequest]) -> DraftRound:
        """Draft a number of tokens for each of ``requests``, one after another."""
        return DraftRound(self, requests)


class DraftRound:
    """The drafts of one step. Those of a greedy request are its best tokens, all others are sampled.

    Penalties count the tokens that a request has, not the drafts before the one that is drawn.
    """

    def __init__(self, sampler: DraftSampler, requests: Sequence[SampleRequest]) -> None:
        self._sampler, self._requests = sampler, requests
        self._drawn: list[Tensor] = []
        """Of each draw int32 ``[n]``: token ids, -1 where the logits were unusable."""
        self._probs: list[dict[int, Tensor]] = []
        """Of each draw: what the tokens of sampled requests are from, float32 ``[vocab_size]``."""
        self._sampled: list[int] = []
        self._is_plain = all(request.params.is_greedy and request.is_plain for request in requests)
        if self._is_plain:
            return
        self._operands = sampling_operands(requests)
        self._sampled = [row for row, request in enumerate(requests) if not request.params.is_greedy]
        offsets = [request.offset(NoiseStream.DRAFT) for request in requests]
        drawn_from_probs = {"temperatures": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        self._draw_operands = {**self._operands, "offsets": torch.tensor(offsets, dtype=torch.int32)}
        for name, value in drawn_from_probs.items():
            self._draw_operands[name] = self._operands[name].clone()
            self._draw_operands[name][self._sampled] = value

    def draw(self, step: DrawnStep) -> Tensor:
        """The next draft of the first n requests, from a step of the head that has drawn the best token of each row.

        Int32 ``[n]`` on the device: ids that the head can go on with. Nothing waits for a GPU.
        """
        columns = step.drawn[0] if self._is_plain else self._draw_again(step.logits.float())
        token_ids = columns.clamp(min=0)
        if self._sampler.token_ids is not None:
            token_ids = self._sampler.token_ids[token_ids.long()].int()
        self._drawn.append(torch.where(columns < 0, columns, token_ids))
        return token_ids

    def _draw_again(self, logits: Tensor) -> Tensor:
        """With penalties and with the requests' own noise."""
        sampler, count, device = self._sampler, len(logits), logits.device
        if not self._drawn:
            self._draw_operands = _moved(self._draw_operands, device)
        values = apply_penalties(logits, self._requests[:count], sampler.vocab_size, sampler.token_ids)
        values = self._with_probs(values, [row for row in self._sampled if row < count])
        operands = {name: value[:count] for name, value in self._draw_operands.items()}
        operands["offsets"] = operands["offsets"] + len(self._drawn)
        return draw(values, logits, operands, sampler.limit)[0]

    def _with_probs(self, logits: Tensor, rows: list[int]) -> Tensor:
        """``logits`` with those of sampled requests' probabilities in ``rows``, which are kept."""
        self._probs.append({})
        if not rows:
            return logits
        on_device = torch.tensor(rows).to(logits.device, non_blocking=True)
        probs = filtered_probs(
            logits[on_device], {name: value[rows] for name, value in self._operands.items()}, self._sampler.limit
        )
        self._probs[-1] = dict(zip(rows, self._of_all_ids(probs), strict=True))
        return logits.index_copy(0, on_device, probs.log())

    def _of_all_ids(self, probs: Tensor) -> Tensor:
        token_ids = self._sampler.token_ids
        if token_ids is None:
            return probs
        return probs.new_zeros(len(probs), self._sampler.vocab_size).index_copy(1, token_ids, probs)

    def finish(self) -> list[Drafts]:
        """The drafts of each request, up to the first whose logits were unusable. Waits for them, all at once."""
        sizes = [len(each) for each in self._drawn]
        by_draw = torch.cat(self._drawn).cpu().split(sizes)
        drafts = []
        for row in range(len(self._requests)):
            token_ids: list[int] = []
            for ids in by_draw:
                if row >= len(ids) or ids[row] < 0:
                    break
                token_ids.append(int(ids[row]))
            probs = [each[row] for each in self._probs[: len(token_ids)]] if row in self._sampled else None
            drafts.append((token_ids, probs))
        return drafts


def _moved(operands: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device, non_blocking=True) for name, value in operands.items()}
