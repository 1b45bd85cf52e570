"""``POST /v1/completions``: continues texts or token ids."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from qwen4exp_trt.runtime.async_llm import AsyncLLM
from qwen4exp_trt.runtime.serve.generation import Usage, check_not_aborted, generate_all, sampling_params
from qwen4exp_trt.runtime.serve.logprobs import CompletionLogprobs, shown_logprobs
from qwen4exp_trt.runtime.serve.protocol import CompletionRequest

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, for this endpoint."""


@dataclass
class _Choice:
    texts: list[str] = field(default_factory=list)
    logprobs: dict[str, list[Any]] | None = None
    finish_reason: str | None = None


class Completion:
    """One request and its answer, which is read once: by `events` or by `body`."""

    def __init__(self, llm: AsyncLLM, request: CompletionRequest, model: str) -> None:
        self._llm, self._request = llm, request
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._head = {"id": self._id, "object": "text_completion", "created": int(time.time()), "model": model}
        self._usage = Usage()

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer of a stream, event by event."""
        usage = {"usage": None} if self._request.includes_usage else {}
        async with aclosing(self._pieces()) as pieces:
            async for index, text, logprobs, finish_reason in pieces:
                yield {**self._head, "choices": [_choice(index, text, logprobs, finish_reason)], **usage}
        if self._request.includes_usage:
            yield {**self._head, "choices": [], "usage": self._usage.body()}

    async def body(self) -> dict[str, Any]:
        """The answer as a whole."""
        choices = [_Choice() for _ in self._request.prompt]
        async with aclosing(self._pieces()) as pieces:
            async for index, text, logprobs, finish_reason in pieces:
                choice = choices[index]
                choice.texts.append(text)
                choice.finish_reason = finish_reason
                if choice.logprobs is None:
                    choice.logprobs = logprobs
                elif logprobs is not None:
                    for name, values in logprobs.items():
                        choice.logprobs[name] += values
        listed = [_choice(i, "".join(one.texts), one.logprobs, one.finish_reason) for i, one in enumerate(choices)]
        return {**self._head, "choices": listed, "usage": self._usage.body()}

    async def _pieces(self) -> AsyncGenerator[tuple[int, str, dict[str, Any] | None, str | None], None]:
        """Index of the prompt, text, log-probabilities and, with the last piece of a prompt, the finish reason."""
        request, llm = self._request, self._llm
        max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        params = sampling_params(request, llm.default_sampling_params, max_tokens, request.logprobs)
        prompts = [one if isinstance(one, str) else {"prompt_token_ids": one} for one in request.prompt]
        echoes = {index: self._echo(one) for index, one in enumerate(request.prompt)} if request.echo else {}
        logprobs = [CompletionLogprobs(request.logprobs or 0) for _ in prompts]
        async with aclosing(generate_all(llm, prompts, params, self._id, request.priority or 0)) as chunks:
            async for index, chunk in chunks:
                check_not_aborted(chunk)
                self._usage.add(chunk)
                found = None if request.logprobs is None else logprobs[index].body(shown_logprobs(chunk))
                yield index, echoes.pop(index, "") + chunk.text, found, chunk.finish_reason

    def _echo(self, prompt: str | list[int]) -> str:
        if isinstance(prompt, str) or self._llm.tokenizer is None:
            return prompt if isinstance(prompt, str) else ""
        return self._llm.tokenizer.decode(prompt, skip_special_tokens=False)


def _choice(index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}
