"""What a request returns, shaped like vLLM's outputs."""

from __future__ import annotations

from dataclasses import dataclass

from qwen4exp_trt.runtime.sampler import SampledToken
from qwen4exp_trt.runtime.stopping import FinishReason
from qwen4exp_trt.runtime.tokenizer import Tokenizer


@dataclass(frozen=True)
class Logprob:
    """Natural-log probability of a token, its rank among all tokens (1 = most likely) and its text.

    ``decoded_token`` is the token's text alone (U+FFFD for a part of a character), None without a tokenizer.
    """

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True)
class CompletionOutput:
    """One output of a request, complete or so far.

    ``token_ids`` has the stop token, ``text`` does not. ``logprobs`` has one dict a token, from id to Logprob: the
    sampled token first, then the alternatives, best first; None where not asked for. ``cumulative_logprob`` is the
    sum over the sampled tokens. ``finish_reason`` is None while the output goes on; ``stop_reason`` is the stop
    string, or the id of the stop or eos token, that ended it.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class StreamChunk:
    """What one step added to a streamed output; ``finish_reason`` is set with the last chunk."""

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class RequestOutput:
    """A request's prompt and outputs. ``prompt`` is None if the request came as token ids."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool


def logprobs_from_sampled(sampled: SampledToken, tokenizer: Tokenizer | None) -> dict[int, Logprob] | None:
    """The entry of ``CompletionOutput.logprobs`` for one token, or None where the request asked for none."""
    if sampled.top_logprobs is None:
        return None
    ranked = {sampled.token_id: (sampled.logprob, sampled.rank)}
    for rank, (token_id, logprob) in enumerate(sampled.top_logprobs.items(), start=1):
        ranked.setdefault(token_id, (logprob, rank))
    return {
        token_id: Logprob(logprob, rank, _token_text(token_id, tokenizer))
        for token_id, (logprob, rank) in ranked.items()
    }


def _token_text(token_id: int, tokenizer: Tokenizer | None) -> str | None:
    return None if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)
