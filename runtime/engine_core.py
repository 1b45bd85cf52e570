"""The serving loop: schedule, run, sample, until every request is done."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import torch
from torch import Tensor

from qwen4exp_trt.errors import RequestError
from qwen4exp_trt.runtime.backend import Backend
from qwen4exp_trt.runtime.limits import EngineLimits
from qwen4exp_trt.runtime.sampler import sample
from qwen4exp_trt.runtime.sampling_params import SamplingParams
from qwen4exp_trt.runtime.scheduler import ScheduledSequence, Scheduler
from qwen4exp_trt.runtime.sequence import Sequence
from qwen4exp_trt.runtime.step_inputs import build_step_inputs
from qwen4exp_trt.runtime.stopping import StopChecker
from qwen4exp_trt.runtime.tokenizer import Tokenizer


class EngineCore:
    """Serves token-id requests on one backend."""

    def __init__(
        self,
        backend: Backend,
        limits: EngineLimits,
        num_blocks: int,
        vocab_size: int,
        stop_token_ids: SequenceOf[int],
        tokenizer: Tokenizer | None,
    ) -> None:
        self.backend, self.limits, self.tokenizer = backend, limits, tokenizer
        self.vocab_size, self.stop_token_ids = vocab_size, tuple(stop_token_ids)
        self.scheduler = Scheduler(limits, num_blocks)
        self._next_id = 0

    def make_sequence(self, prompt: str | None, prompt_token_ids: SequenceOf[int], params: SamplingParams) -> Sequence:
        """Check a request and make its sequence; nothing is queued yet."""
        self.check_prompt(prompt_token_ids, room_for=1)
        if params.stop and self.tokenizer is None:
            raise RequestError("SamplingParams.stop needs text, but this bundle has no tokenizer; use stop_token_ids")
        out_of_range = [token for token in params.stop_token_ids or () if token >= self.vocab_size]
        if out_of_range:
            raise RequestError(f"stop_token_ids {out_of_range} are not below the vocabulary size {self.vocab_size}")
        request_id, self._next_id = str(self._next_id), self._next_id + 1
        checker = StopChecker(params, self.stop_token_ids, len(prompt_token_ids), self.limits.max_seq_len)
        return Sequence(request_id, prompt, prompt_token_ids, params, checker, self.tokenizer)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that `make_sequence` made."""
        room = self.limits.max_seq_len - len(sequence.prompt_token_ids)
        max_new = room if sequence.params.max_tokens is None else min(room, sequence.params.max_tokens)
        self.scheduler.add(sequence, len(sequence.prompt_token_ids) + max_new)

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence and free its memory; its result stays as it is."""
        self.scheduler.finish(sequence)

    def step(self) -> list[Sequence]:
        """Run one step and return the sequences that got a token, finished ones included."""
        scheduled = self.scheduler.schedule()
        inputs, sampled = build_step_inputs(scheduled)
        logits = self.backend.run(inputs)
        sequences = [scheduled[index].sequence for index in sampled]
        tokens = sample(
            logits[: len(sequences)],
            [sequence.params for sequence in sequences],
            [sequence.history for sequence in sequences],
            [sequence.generator for sequence in sequences],
            self.tokenizer.vocab_size if self.tokenizer else None,
        )
        for entry in scheduled:
            entry.sequence.num_computed += entry.num_tokens
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.append(token)
            if sequence.finish_reason is not None:
                self.scheduler.finish(sequence)
        return sequences

    def score(self, token_ids: SequenceOf[int]) -> Tensor:
        """Float32 logits ``[T, vocab_size]`` after each token of one sequence. No other request may be running."""
        self.check_prompt(token_ids, room_for=0)
        assert not self.scheduler.has_unfinished, "requests are running"
        params = SamplingParams(max_tokens=1)
        checker = StopChecker(params, (), 0, self.limits.max_seq_len)
        sequence = Sequence("score", None, token_ids, params, checker, None)
        self.scheduler.add(sequence, len(token_ids))
        self.scheduler.schedule()
        try:
            return torch.cat(list(self._score_chunks(sequence)))
        finally:
            self.scheduler.finish(sequence)

    def _score_chunks(self, sequence: Sequence):
        chunk = min(self.limits.prefill_chunk, self.limits.max_logits_rows)
        while sequence.num_tokens_left:
            entry = ScheduledSequence(sequence, min(chunk, sequence.num_tokens_left))
            yield self.backend.run(build_step_inputs([entry], all_rows=True)[0])
            sequence.num_computed += entry.num_tokens

    def check_prompt(self, token_ids: SequenceOf[int], room_for: int) -> None:
        """`RequestError` unless the prompt is not empty, in the vocabulary, and leaves room for new tokens."""
        longest = self.limits.max_seq_len - room_for
        if not token_ids:
            raise RequestError("the prompt is empty; give at least one token")
        if len(token_ids) > longest:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens, but this bundle takes at most {longest} "
                f"(max_seq_len {self.limits.max_seq_len}); shorten it or build with a larger --max-seq-len"
            )
        for token in token_ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.vocab_size:
                raise RequestError(f"prompt token {token!r} is not an id of 0 to {self.vocab_size - 1}")
