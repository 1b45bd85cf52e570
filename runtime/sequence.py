"""One generating sequence: its tokens, what of it is computed, and the memory it owns."""

from __future__ import annotations

import time
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace

from torch import Tensor

from qwen4exp_trt.errors import DroppedError
from qwen4exp_trt.runtime.drafts.acceptance import RequestAcceptance
from qwen4exp_trt.runtime.drafts.rejection import DraftedToken
from qwen4exp_trt.runtime.metrics import RequestMetrics
from qwen4exp_trt.runtime.outputs import CompletionOutput, Logprob, RequestOutput, StreamChunk, logprobs_from_sampled
from qwen4exp_trt.runtime.sampler import SampledToken, SampleRequest, TokenHistory, seed_of
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.sequence_memory import Memory
from qwen4exp_trt.runtime.stopping import FinishReason, StopChecker
from qwen4exp_trt.runtime.tokenizer import IncrementalDetokenizer, Tokenizer


class Sequence:
    """A request while it is served.

    ``max_len`` bounds ``token_ids``, prompt and output together. ``num_computed`` counts the tokens whose states are
    in memory; the rest of ``token_ids`` is still to be run.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: SequenceOf[int],
        params: SamplingParams,
        max_len: int,
        stop_checker: StopChecker,
        tokenizer: Tokenizer | None,
        metrics: RequestMetrics | None = None,
        priority: int = 0,
    ) -> None:
        self.request_id, self.prompt, self.params = request_id, prompt, params
        self.metrics, self.priority = metrics or RequestMetrics(time.monotonic()), priority
        self.prompt_token_ids = list(prompt_token_ids)
        self.token_ids = list(prompt_token_ids)
        self.max_len, self.num_computed = max_len, 0
        self.memory: Memory | None = None
        self.place_in_line: tuple[int, int, int] = (0, 0, 0)
        """Among those of the scheduler: the lowest runs first."""
        self.error: DroppedError | None = None
        """Why this sequence was dropped."""
        self.first_not_finite: str | None = None
        """What of its steps was not finite first, in words, if they are watched."""
        self.draft_token_ids: list[int] = []
        """Tokens that may come next; a step verifies them all or some, and whatever it does not is forgotten."""
        self.draft_probs: list[Tensor] | None = None
        """What each of `draft_token_ids` was sampled from (float32 ``[vocab_size]``), if they were sampled."""
        self.acceptance = RequestAcceptance()
        self.sample_request = SampleRequest(params, TokenHistory(prompt_token_ids), seed_of(params))
        self._stop_checker, self._tokenizer = stop_checker, tokenizer
        self._detokenizer = IncrementalDetokenizer(tokenizer, params.skip_special_tokens) if tokenizer else None
        self._output = _Output()

    @property
    def num_tokens_left(self) -> int:
        """Tokens to run before the next one can be sampled."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_drafts_wanted(self) -> int:
        """The most drafts that may be of use: a step gives a token more than it accepts, up to `max_len` in all."""
        return self.max_len - len(self.token_ids) - 1

    def set_drafts(self, token_ids: SequenceOf[int], probs: SequenceOf[Tensor] | None = None) -> None:
        """Propose ``token_ids``; ``probs`` has what each was sampled from, None if they were not sampled."""
        self.draft_token_ids, self.draft_probs = list(token_ids), None if probs is None else list(probs)

    def row_requests(self, num_drafts: int) -> list[SampleRequest]:
        """What decides about the tokens of a step's rows: of the last token, and of the first ``num_drafts`` drafts."""
        base, drafts, probs = self.sample_request, tuple(self.draft_token_ids[:num_drafts]), self.draft_probs
        requests = [base]
        for row in range(1, num_drafts + 1):
            requests.append(SampleRequest(base.params, base.history, base.seed, drafts[:row]))
        if probs is not None:
            for row, token_id in enumerate(drafts):
                requests[row] = replace(requests[row], drafted=DraftedToken(token_id, probs[row]))
        return requests

    @property
    def held_memory(self) -> Memory:
        """`memory` of a sequence that has some."""
        assert self.memory is not None, f"request {self.request_id} has no memory"
        return self.memory

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.prompt_token_ids)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self._output.finish_reason

    def append(self, sampled: SampledToken) -> None:
        """Take the next token."""
        token_id, out, detokenizer = sampled.token_id, self._output, self._detokenizer
        self.token_ids.append(token_id)
        self.sample_request.history.append(token_id)
        update = self._stop_checker.feed(token_id, detokenizer.feed(token_id) if detokenizer else "")
        text = update.text
        if update.finish_reason is not None:
            out.finish_reason, out.stop_reason = update.finish_reason, update.stop_reason
            text += detokenizer.flush() if update.finish_reason == "length" and detokenizer else ""
        out.texts.append(text)
        out.cumulative_logprob += sampled.logprob
        entry = logprobs_from_sampled(sampled, self._tokenizer)
        if entry is not None:
            out.logprobs.append(entry)

    def chunk_since(self, num_tokens: int) -> StreamChunk:
        """The output after its first ``num_tokens`` tokens."""
        out = self._output
        return StreamChunk(
            text="".join(out.texts[num_tokens:]),
            token_ids=self.token_ids[len(self.prompt_token_ids) + num_tokens :],
            finish_reason=out.finish_reason,
            stop_reason=out.stop_reason,
            logprobs=out.logprobs[num_tokens:] if self.params.logprobs is not None else None,
            request_id=self.request_id,
            prompt_token_ids=self.prompt_token_ids,
            metrics=None if out.finish_reason is None else replace(self.metrics),
        )

    def aborted_chunk(self, num_tokens: int) -> StreamChunk:
        """The output after its first ``num_tokens`` tokens, which is the last of a request that nobody wants on."""
        return replace(self.chunk_since(num_tokens), finish_reason="abort", metrics=replace(self.metrics))

    def request_output(self, finish_reason: FinishReason | None = None) -> RequestOutput:
        """The request's result so far; ``finish_reason`` is that of one which ended otherwise than by its output."""
        out = self._output
        reason = out.finish_reason or finish_reason or (None if self.error is None else "error")
        completion = CompletionOutput(
            index=0,
            text="".join(out.texts),
            token_ids=self.token_ids[len(self.prompt_token_ids) :],
            logprobs=list(out.logprobs) if self.params.logprobs is not None else None,
            cumulative_logprob=out.cumulative_logprob,
            finish_reason=reason,
            stop_reason=out.stop_reason,
        )
        finished, metrics = reason is not None, replace(self.metrics)
        prompt = self.request_id, self.prompt, self.prompt_token_ids
        return RequestOutput(*prompt, [completion], finished, metrics, self.error)


@dataclass
class _Output:
    texts: list[str] = field(default_factory=list)
    """What each token added."""
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
