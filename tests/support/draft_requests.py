"""Requests whose next token has a sampled draft."""

from __future__ import annotations

import torch
from torch import Tensor

from qwen4exp_trt.runtime.drafts.rejection import DraftedToken, filtered_probs
from qwen4exp_trt.runtime.sampler import NoiseStream, SampleRequest, TokenHistory, draw, sampling_operands
from qwen4exp_trt.runtime.sampling_params import SamplingParams


def requests_of(params: SamplingParams, count: int) -> list[SampleRequest]:
    """Requests of different seeds, each about to sample its third token."""
    history = TokenHistory([1, 2])
    for token in (3, 4):
        history.append(token)
    return [SampleRequest(params, history, seed) for seed in range(1000, 1000 + count)]


def drafts_of(logits: Tensor, requests: list[SampleRequest]) -> list[DraftedToken]:
    """A draft of each request from the same draft ``logits``, with the request's own parameters."""
    operands = sampling_operands(requests)
    rows = logits.expand(len(requests), -1)
    probs = filtered_probs(logits[None], {name: value[:1] for name, value in operands.items()}, None)[0]
    offsets = [request.offset(NoiseStream.DRAFT) for request in requests]
    operands["offsets"] = torch.tensor(offsets, dtype=torch.int32)
    return [DraftedToken(token, probs) for token in draw(rows, rows, operands, None)[0].tolist()]
