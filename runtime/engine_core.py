"""The serving loop: schedule, run, sample, until every request is done."""

from __future__ import annotations

import itertools
import logging
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen4exp_trt.errors import DroppedError, PromptTooLongError, RequestError, UnreadableRowsError
from qwen4exp_trt.runtime.backend import Backend
from qwen4exp_trt.runtime.cuda_device import is_lost
from qwen4exp_trt.runtime.drafts.drafting import Drafting
from qwen4exp_trt.runtime.drafts.verification import verified
from qwen4exp_trt.runtime.hooks import NoPrefixCache, PrefixCache
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.metrics import EngineMetrics, Metric, gauge
from qwen4exp_trt.runtime.nan_trace import NanTrace
from qwen4exp_trt.runtime.ngram_table import TokenWindow
from qwen4exp_trt.runtime.sampler import SampledToken
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.scheduler import ScheduledSequence, Scheduler
from qwen4exp_trt.runtime.sequence import Sequence
from qwen4exp_trt.runtime.sequence_states import SequenceStates
from qwen4exp_trt.runtime.step_inputs import build_step_inputs
from qwen4exp_trt.runtime.stopping import StopChecker
from qwen4exp_trt.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_UNUSABLE = (
    "its logits have NaN, +inf or only -inf, so no token can be sampled: the model's weights or states are damaged, "
    "or a value overflowed"
)
_HOW_TO_FIND = "debug_nan=True (--debug-nan) says in which module it began"


class EngineCore:
    """Serves token-id requests on one backend. Threads take turns at `lock`, which every method holds that needs to."""

    def __init__(
        self,
        backend: Backend,
        limits: EngineLimits,
        num_blocks: int,
        vocab_size: int,
        stop_token_ids: SequenceOf[int],
        tokenizer: Tokenizer | None,
        *,
        max_num_seqs: int | None = None,
        metrics: EngineMetrics | None = None,
        prefix_cache: Callable[[SequenceStates], PrefixCache] | None = None,
        drafting: Drafting | None = None,
        nan_trace: NanTrace | None = None,
    ) -> None:
        self.metrics = metrics or EngineMetrics()
        self.backend, self.limits, self.tokenizer = backend, limits, tokenizer
        self.vocab_size, self.stop_token_ids = vocab_size, tuple(stop_token_ids)
        self.drafting, self.nan_trace = drafting, nan_trace
        pool, num_rewritten, num_lookahead = backend.states, 0, 0
        if drafting is not None:
            proposer = drafting.proposer
            num_rewritten, num_lookahead = proposer.num_rewritten, proposer.num_lookahead
            pool = pool if proposer.states is None else pool.joined(proposer.states)
            self.metrics.add_source(drafting.collect)
        self.states = SequenceStates(pool, limits, num_blocks, num_rewritten)
        self.prefix_cache = prefix_cache(self.states) if prefix_cache else NoPrefixCache()
        self.scheduler = Scheduler(
            limits, self.states, max_num_seqs, self.prefix_cache, num_lookahead, metrics=self.metrics
        )
        self.metrics.add_source(self._gauges)
        self._ids = itertools.count()
        # Re-entrant, since the garbage collector may close a dropped stream in the middle of a step.
        self.lock = threading.RLock()
        self._depth, self._to_abort = 0, deque[Sequence]()

    def make_sequence(
        self,
        prompt: str | None,
        prompt_token_ids: Iterable[Any],
        params: SamplingParams,
        request_id: str | None = None,
        priority: int = 0,
    ) -> Sequence:
        """Check a request and make its sequence; nothing is queued yet.

        Of waiting requests those with the lowest ``priority`` run first.
        """
        metrics = self.metrics.request()
        token_ids = self._checked_prompt(prompt_token_ids, room_for=1)
        if params.stop and self.tokenizer is None:
            raise RequestError("SamplingParams.stop needs text, but this bundle has no tokenizer; use stop_token_ids")
        out_of_range = [token for token in params.stop_token_ids or () if token >= self.vocab_size]
        if out_of_range:
            raise RequestError(f"stop_token_ids {out_of_range} are not below the vocabulary size {self.vocab_size}")
        max_seq_len = self._longest_sequence(params, len(token_ids))
        checker = StopChecker(params, self.stop_token_ids, len(token_ids), max_seq_len)
        room = max_seq_len - len(token_ids)
        max_len = len(token_ids) + (room if params.max_tokens is None else min(room, params.max_tokens))
        self.scheduler.check_capacity(max_len)
        own_id = str(next(self._ids)) if request_id is None else request_id
        return Sequence(own_id, prompt, token_ids, params, max_len, checker, self.tokenizer, metrics, priority)

    def _longest_sequence(self, params: SamplingParams, num_prompt_tokens: int) -> int:
        """Without ``max_tokens`` an output may go on as far as the KV cache holds it."""
        num_cached = self.scheduler.num_blocks * self.limits.block_size
        if num_prompt_tokens >= num_cached:
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens} tokens, but the KV cache has room for {num_cached} in its "
                f"{self.scheduler.num_blocks} pages; shorten it or give the cache more pages"
            )
        return self.limits.max_seq_len if params.max_tokens is not None else min(self.limits.max_seq_len, num_cached)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that `make_sequence` made."""
        with self._turn():
            self.scheduler.add(sequence)

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence and free its memory; its result stays as it is."""
        self._to_abort.append(sequence)
        with self._turn():
            pass

    def close(self) -> None:
        """Let the prefix cache write what it keeps; nothing runs afterwards."""
        with self._turn():
            self.prefix_cache.close()

    def step(self) -> list[Sequence]:
        """Run one step: each running sequence gets a token, or more of its prompt computed. Returns those.

        If the step fails, the sequences that it ran are dropped: their states may be half updated. A sequence whose
        logits are unusable, or whose rows of an n-gram table cannot be read, is dropped alone. Does nothing if another
        thread has finished every sequence meanwhile.
        """
        with self._turn():
            scheduled = self.scheduler.schedule()
            try:
                if scheduled:
                    self._run(scheduled)
                return [entry.sequence for entry in scheduled]
            except BaseException as error:
                for entry in scheduled:
                    self._drop(entry.sequence, f"a step failed that it shared with others: {brief(error)}", error)
                raise

    def go_on_after(self, error: Exception, sequences: Iterable[Sequence]) -> None:
        """Log ``error``, with which `step` has failed and dropped what it ran. Raises it if no other step would do
        better: the GPU is lost, or none of ``sequences``, which are open, was dropped."""
        if is_lost(self.backend.device) or all(sequence.error is None for sequence in sequences):
            raise error
        logger.error("a step failed with its requests", exc_info=error)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Hold the lock. Aborts that come meanwhile, in this thread as well, wait until nothing is half done."""
        with self.lock:
            self._depth += 1
            try:
                yield
            finally:
                while self._depth == 1 and self._to_abort:
                    sequence = self._to_abort.popleft()
                    self._finish(sequence, sequence.finish_reason or "abort")
                self._depth -= 1

    def _gauges(self) -> Iterator[Metric]:
        scheduler = self.scheduler
        yield gauge("num_requests_running", "Sequences that steps run.", scheduler.num_running)
        yield gauge("num_requests_waiting", "Requests that wait for their first step.", scheduler.num_waiting)
        used = 1 - scheduler.num_free_blocks / scheduler.num_blocks
        yield gauge("kv_cache_usage_perc", "Pages of the KV cache in use, also by the prefix cache; 1 is all.", used)

    def _drop(self, sequence: Sequence, reason: str, cause: BaseException | None = None) -> None:
        sequence.error = DroppedError(f"request {sequence.request_id} was dropped: {reason}")
        sequence.error.__cause__ = cause
        self._finish(sequence, "error")

    def _finish(self, sequence: Sequence, reason: str) -> None:
        self.scheduler.finish(sequence)
        self.metrics.finished(sequence.metrics, reason, len(sequence.prompt_token_ids))

    def _run(self, scheduled: list[ScheduledSequence]) -> None:
        start = self.metrics.clock()
        for entry in scheduled:
            if entry.sequence.metrics.first_scheduled_time is None:
                self.metrics.scheduled(entry.sequence.metrics)
        self.backend.prefetch(self._upcoming(scheduled))
        scheduled, entries, rows, stack = self._execute(scheduled)
        if not scheduled:
            return
        if self.nan_trace is not None:
            self._note_not_finite(self.nan_trace, scheduled)
        now = self.metrics.clock()
        self.metrics.stepped(now - start, sum(entry.num_prompt_tokens for entry in scheduled))
        for entry in scheduled:
            self._take(entry, list(itertools.islice(rows, entry.num_logits_rows)), now)
        if self.drafting is not None:
            if self.drafting.proposer.num_rewritten:  # a draft head runs meanwhile
                self.backend.prefetch(self._last_tokens(entries), at_once=True)
            self.drafting.proposer.observe(scheduled, stack)
        for entry in scheduled:
            if entry.sequence.memory is not None:
                self.prefix_cache.after_step(entry.sequence)
        for sequence in [entry.sequence for entry in entries]:
            if sequence.finish_reason is not None and sequence.memory is not None:
                self._finish(sequence, sequence.finish_reason)
        if self.drafting is not None:
            self.drafting.propose(entry.sequence for entry in entries if entry.sequence.memory is not None)

    @staticmethod
    def _note_not_finite(trace: NanTrace, scheduled: SequenceOf[ScheduledSequence]) -> None:
        """Keep with each sequence what of it was the first that is not finite: later steps only show what follows."""
        end = 0
        for entry in scheduled:
            start, end = end, end + entry.num_tokens
            found = entry.sequence.first_not_finite or trace.first_not_finite(range(start, end))
            entry.sequence.first_not_finite = found

    def _execute(
        self, scheduled: list[ScheduledSequence]
    ) -> tuple[list[ScheduledSequence], list[ScheduledSequence], Iterator[SampledToken | None], Tensor | None]:
        """Run a step, without the sequences whose n-gram rows cannot be read, which are dropped.

        Returns what has run, those of it that get logits, and the results of `_sample` for these.
        """
        while scheduled:
            inputs, sampled = build_step_inputs(scheduled)
            entries = [scheduled[index] for index in sampled]
            try:
                return scheduled, entries, *self._sample(inputs, entries)
            except UnreadableRowsError as error:
                for index, cause in error.errors.items():
                    self._drop(scheduled[index].sequence, str(cause), cause)
                scheduled = [entry for index, entry in enumerate(scheduled) if index not in error.errors]
        return [], [], iter(()), None

    def _upcoming(self, scheduled: list[ScheduledSequence]) -> Iterator[TokenWindow]:
        """Tokens that steps after this one will run, as far as they are known."""
        for sequence, start, stop in self.scheduler.upcoming(scheduled):
            yield TokenWindow(sequence.token_ids, start, stop)

    def _last_tokens(self, entries: list[ScheduledSequence]) -> Iterator[TokenWindow]:
        """What the next step will run for certain of sequences that have got tokens."""
        for sequence in (entry.sequence for entry in entries):
            if sequence.memory is not None and sequence.finish_reason is None:
                yield TokenWindow(sequence.token_ids, sequence.num_computed, len(sequence.token_ids))

    def _take(self, entry: ScheduledSequence, row_tokens: list[SampledToken | None], now: float) -> None:
        """Add the tokens of a step to a sequence; drop it if it comes to a row that none could be sampled from."""
        sequence, drafts = entry.sequence, entry.sequence.draft_token_ids[: entry.num_drafts]
        taken = verified(drafts, row_tokens) if drafts else row_tokens
        num_before = sequence.num_output_tokens
        for token in taken:
            if token is None:
                self._drop(sequence, f"{_UNUSABLE}; {sequence.first_not_finite or _HOW_TO_FIND}")
                return
            sequence.append(token)
            if sequence.finish_reason is not None:
                break
        num_new = sequence.num_output_tokens - num_before
        sequence.set_drafts(())
        self.states.commit(sequence, entry.num_tokens, entry.num_tokens - entry.num_drafts + max(num_new - 1, 0))
        if taken:
            self.metrics.produced(sequence.metrics, num_new, now)
        if drafts and self.drafting is not None:
            self.metrics.drafted(sequence.metrics, len(drafts), len(taken) - 1)
            self.drafting.verified(sequence, len(drafts), len(taken) - 1)

    def _sample(
        self, inputs: Mapping[str, Tensor], entries: SequenceOf[ScheduledSequence]
    ) -> tuple[Iterator[SampledToken | None], Tensor | None]:
        """Run a step. Returns the tokens of the rows of logits, which are those of ``entries``, and the stack."""
        requests = [request for entry in entries for request in entry.sequence.row_requests(entry.num_drafts)]
        vocab_limit = self.tokenizer.vocab_size if self.tokenizer else None
        step = self.backend.sample_step(inputs, requests, vocab_limit)
        return iter(step.tokens), step.stack

    def score(self, token_ids: Iterable[Any]) -> Tensor:
        """Float32 logits ``[T, vocab_size]`` after each token of one sequence.

        Other requests may be open, but keep their memory: `RequestError` if they leave too little.
        """
        checked = self._checked_prompt(token_ids, room_for=0)
        self.scheduler.check_capacity(len(checked))
        checker = StopChecker(SamplingParams(), (), 0, self.limits.max_seq_len)
        sequence = Sequence(
            "score", None, checked, SamplingParams(), len(checked), checker, None, self.metrics.request()
        )
        with self._turn():
            if not self.scheduler.acquire_memory(sequence):
                raise RequestError(
                    f"{self.scheduler.num_unfinished} open requests leave no slot or too few pages to score "
                    f"{len(checked)} tokens; finish or close their streams first"
                )
            try:
                return torch.cat(list(self._score_chunks(sequence)))
            finally:
                self.scheduler.finish(sequence)

    def _score_chunks(self, sequence: Sequence) -> Iterator[Tensor]:
        chunk = min(self.limits.prefill_chunk, self.limits.max_logits_rows)
        while sequence.num_tokens_left:
            entry = ScheduledSequence(sequence, min(chunk, sequence.num_tokens_left))
            yield self.backend.run(build_step_inputs([entry], all_rows=True)[0])
            self.states.commit(sequence, entry.num_tokens)

    def _checked_prompt(self, token_ids: Iterable[Any], room_for: int) -> list[int]:
        """The ids as ints; `RequestError` unless there are some, in the vocabulary, with room for new tokens."""
        if isinstance(token_ids, Tensor | np.ndarray):
            token_ids = token_ids.tolist()
        if not isinstance(token_ids, Iterable) or isinstance(token_ids, str | bytes | Mapping):
            raise RequestError(f"prompt token ids are a {type(token_ids).__name__}; a list of integers was expected")
        checked = [self._checked_id(token) for token in token_ids]
        longest = self.limits.max_seq_len - room_for
        if not checked:
            raise RequestError("the prompt is empty; give at least one token")
        if len(checked) > longest:
            raise PromptTooLongError(
                f"the prompt has {len(checked)} tokens, but this bundle takes at most {longest} "
                f"(max_seq_len {self.limits.max_seq_len}); shorten it or build with a larger --max-seq-len"
            )
        return checked

    def _checked_id(self, token: Any) -> int:
        try:
            token_id = -1 if isinstance(token, bool) else operator.index(token)
        except TypeError:
            token_id = -1
        if not 0 <= token_id < self.vocab_size:
            raise RequestError(f"prompt token {token!r} is not an id of 0 to {self.vocab_size - 1}")
        return token_id


def brief(error: BaseException) -> str:
    """The class and the first line of a message: CUDA's are long."""
    return f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
