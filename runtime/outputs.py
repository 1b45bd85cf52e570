"""What a request returns, shaped like vLLM's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qwen4exp_trt.errors import DroppedError
from qwen4exp_trt.runtime.metrics import RequestMetrics
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
    """What one step added to a streamed output, or several steps if it was not taken at once.

    ``logprobs`` are those of ``token_ids`` as in `CompletionOutput`. With the last chunk, and no other,
    ``finish_reason`` is set, maybe ``stop_reason``, and ``metrics``.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    request_id: str = ""
    prompt_token_ids: Sequence[int] = ()
    metrics: RequestMetrics | None = None


def joined_chunks(chunks: Sequence[StreamChunk]) -> StreamChunk:
    """One chunk for consecutive ones of a request, at least one."""
    if len(chunks) == 1:
        return chunks[0]
    logprobs = [entry for chunk in chunks for entry in chunk.logprobs or ()]
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        logprobs=None if chunks[0].logprobs is None else logprobs,
    )


@dataclass(frozen=True)
class RequestOutput:
    """A request's prompt and outputs. ``prompt`` is None if the request came as token ids.

    ``error`` says why a request was given up (`DroppedError`): its ``finish_reason`` is ``error`` then, and its output
    what it had until there.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    error: DroppedError | None = None


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
